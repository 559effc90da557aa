"""Other people's programs, in an environment of their own: ``make test-peers`` makes it and runs these tests.

A test whose program is not there is skipped, with the reason.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.peer_programs import FOLDER as FOLDER
from tests.helpers.peer_programs import (
    MODEL,
    Program,
    Show,
    forking_vllm,
)
from tests.helpers.starters import one as one
from tests.helpers.starters import own_tmpdir as own_tmpdir
from tests.helpers.support import (
    ROOT,
    Starter,
)

_found: set[str] = set()  # programs


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail where every program was missing: what then has passed says nothing of other people's programs."""
    wanted = [item for item in session.items if item.get_closest_marker("peers") is not None]
    if exitstatus == pytest.ExitCode.OK and wanted and not _found:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.fixture(scope="session")
def program() -> Program:
    """Return the path of a program; skips a test whose program could not be installed."""

    def find(name: str) -> Path:
        if (path := FOLDER / "bin" / name).exists():
            _found.add(name)
            return path
        if not FOLDER.exists():
            pytest.skip(f"there is no {FOLDER}: make test-peers makes it")
        for log in FOLDER.glob(f"{name}*.log"):
            pytest.skip(f"{name} was not installed: {log.read_text().strip().rpartition(chr(10))[2]}")
        pytest.skip(f"{FOLDER} has no {name}")

    return find


@pytest.fixture
def sglang_in_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have sglang in PATH: an index has no wheel for CPUs, so MPILLM_SGLANG names an environment with it."""
    if not (folder := os.environ.get("MPILLM_SGLANG")):
        pytest.skip("MPILLM_SGLANG names no environment with SGLang")
    _found.add("sglang")
    monkeypatch.setenv("PATH", f"{folder}/bin{os.pathsep}{os.environ['PATH']}")


@pytest.fixture(scope="session")
def model() -> Path:
    """Return the folder of a small real model."""
    command = [sys.executable, "-m", "mpillm", "fetch-model", MODEL]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        pytest.skip(f"{MODEL} could not be fetched: {ended.stderr.strip().rpartition(chr(10))[2]}")
    return ROOT / ended.stdout.strip().rpartition("\n")[2]


@pytest.fixture(scope="session")
def show(request: pytest.FixtureRequest) -> Show:
    """Print a line of the report, whatever pytest does with output."""
    capture: Any = request.config.pluginmanager.getplugin("capturemanager")

    def line(text: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n  {text}", flush=True)

    return line


@pytest.fixture(scope="module")
def start() -> Iterator[Starter]:
    """Yield a starter of commands that several tests of a file use; end them after the last."""
    folder = Path(tempfile.mkdtemp(prefix="mpillm-peers-"))
    starter = Starter("openmpi", folder)
    yield starter
    for command in starter.commands:
        command.kill()
    shutil.rmtree(folder)


@pytest.fixture
def prompts(tmp_path: Path) -> Callable[[int], Path]:
    """Return a data set with the first prompts of ours."""

    def make(n: int) -> Path:
        lines = (ROOT / "mpillm" / "data" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:n]
        (path := tmp_path / f"prompts{n}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return make


@pytest.fixture
def in_path(program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """Have vllm in PATH, and its settings for CPUs in the environment; return these."""
    program("vllm")
    settings = forking_vllm(tmp_path / "program")
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return settings


@pytest.fixture
def nixl(in_path: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip where NIXL is not installed. Each of several servers on this machine gets one thread.

    On two cores, the threads of three servers wait for each other most of the time, and leases expire.
    """
    if not [*FOLDER.glob("lib/python*/site-packages/nixl")]:
        pytest.skip(f"{FOLDER} has no nixl")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
