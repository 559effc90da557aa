"""Folders that a killed `mpillm mpirun` leaves in TMPDIR."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launch import run_folders

_HOLDS = (
    "from launch.run_folders import temporary\nwith temporary() as name:\n print(name, flush=True)\n input()"
)


@pytest.fixture(autouse=True)
def own_tmpdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()


def sweep() -> None:
    """Sweep in a process that has this TMPDIR from its start."""
    subprocess.run(
        [sys.executable, "-c", "from launch.run_folders import sweep\nsweep()"], check=True, timeout=300
    )


@contextmanager
def holder() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    command = [sys.executable, "-c", _HOLDS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_folders_of_killed_commands_are_removed(tmp_path: Path) -> None:
    with holder() as (killed, left), holder() as (living, kept):
        (left / "started").touch()
        killed.kill()
        killed.wait(300)
        assert left.is_dir() and kept.is_dir()
        sweep()
        assert not left.exists() and kept.is_dir()
        living.communicate("\n", 60)
        assert not kept.exists()


def test_folders_that_are_not_known_to_be_left_stay(tmp_path: Path) -> None:
    """The process may live on another host; a name may lead elsewhere."""
    with run_folders.temporary(tmp_path) as own:
        head, place, pid, ticks, end = Path(own).name.rsplit("-", 4)
        gone = "-".join((head, place, pid, f"{ticks}1", end))
        strangers = [
            tmp_path / "-".join((head, "0" * 8, pid, f"{ticks}1", end)),
            tmp_path / ".mpillm-abc",
            tmp_path / f"{gone}-more",
        ]
        for folder in strangers:
            folder.mkdir()
        link = tmp_path / gone
        link.symlink_to(tmp_path / "elsewhere")
        sweep()
        assert all(folder.is_dir() for folder in strangers)
        assert link.is_symlink() and (tmp_path / "elsewhere").is_dir() and Path(own).is_dir()
        link.unlink()
        link.mkdir()
        sweep()
        assert not link.exists()
