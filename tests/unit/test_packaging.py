"""What `pip install` puts into an environment: the command, type information and data files."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

from mpillm import __version__
from tests.helpers.wheels import FILES, PACKAGES, ROOT, build_wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Return the wheel of this tree."""
    return zipfile.ZipFile(build_wheel(tmp_path_factory.mktemp("wheel")))


@pytest.mark.long
def test_all_files_are_in_it(wheel: zipfile.ZipFile) -> None:
    there = {name for name in wheel.namelist() if ".dist-info/" not in name}
    wanted = {
        file.relative_to(ROOT).as_posix()
        for name in PACKAGES
        for file in (ROOT / name).rglob("*")
        if file.is_file()
    }
    assert there == {name for name in wanted if "__pycache__" not in name and not name.endswith("ruff.toml")}
    assert {f"{name}/py.typed" for name in PACKAGES} <= there


@pytest.mark.long
def test_its_version(wheel: zipfile.ZipFile) -> None:
    assert Path(str(wheel.filename)).name == f"mpillm-{__version__}-py3-none-any.whl"


def test_the_command(wheel: zipfile.ZipFile) -> None:
    """`mpillm` does what ``python -m mpillm`` does."""
    (file,) = (name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    entries = ConfigParser()
    entries.read_string(wheel.read(file).decode())
    module, _, function = entries["console_scripts"]["mpillm"].partition(":")
    script = f"import sys; from {module} import {function}; sys.exit({function}())"
    done = subprocess.run(
        [sys.executable, "-c", script, "--version"], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout == f"mpillm {__version__}\n"


def test_the_container_gets_what_the_wheel_is_made_of() -> None:
    """And its lines are a shell's. No image is built here."""
    text = (ROOT / "Containerfile").read_text(encoding="utf-8")
    copied = {word for line in re.findall(r"^COPY (.*) /src", text, re.MULTILINE) for word in line.split()}
    assert copied == {*PACKAGES, *FILES}
    lines = re.findall(r"^RUN ((?:.*\\\n)*.*)$", text, re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        subprocess.run(["sh", "-n", "-c", line.replace("\\\n", "")], check=True, timeout=300)
    (extras,) = re.findall(r"^ARG EXTRAS=(.*)$", text, re.MULTILINE)
    known = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert all(f"\n{extra} = [" in known for extra in extras.split(","))
