"""Removal of the shared memory that a baseline's killed processes leave."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import psutil

from launch.shared_files import SHM, mapped


class LeftInShm:
    """Context that removes new files in /dev/shm which processes had mapped, when it exits.

    A process that is killed cannot remove its shared memory.
    """

    def __init__(self) -> None:
        self._before: set[Path] = set()
        self._files: dict[Path, int] = {}  # inodes

    def __enter__(self) -> LeftInShm:
        self._before = set(SHM.iterdir())
        return self

    def __exit__(self, *_: object) -> None:
        for path, inode in self._files.items():
            with contextlib.suppress(OSError):  # its process has removed it
                if path.stat().st_ino == inode:
                    path.unlink()

    def note(self, pids: Iterable[int]) -> None:
        """Note the files of processes that still run, and of all processes below them."""
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                for one in (process, *process.children(recursive=True)):
                    files = mapped(one.pid)
                    self._files |= {path: inode for path, inode in files.items() if path not in self._before}
