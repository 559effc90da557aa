"""What `pip install` puts into an environment: the command, type information and data files."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

from mpillm import __version__

ROOT = Path(__file__).parents[2]
PACKAGES = ("disagg", "launch", "mpillm")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Return the wheel of this tree, made in a copy of it: setuptools leaves folders where it works."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        "made",
        ".",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (made,) = (folder / "made").iterdir()
    return zipfile.ZipFile(made)


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


def test_the_command(
    wheel: zipfile.ZipFile, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`mpillm` does what ``python -m mpillm`` does."""
    (file,) = (name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    entries = ConfigParser()
    entries.read_string(wheel.read(file).decode())
    module, _, function = entries["console_scripts"]["mpillm"].partition(":")
    monkeypatch.setattr(sys, "argv", ["mpillm", "--version"])
    assert getattr(importlib.import_module(module), function)() == 0
    assert capsys.readouterr().out == f"mpillm {__version__}\n"
