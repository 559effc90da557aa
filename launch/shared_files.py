"""The files in /dev/shm that a process has mapped: the shared memory of MPI, NCCL and servers' workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

SHM = Path("/dev/shm")


class LeftInShm:
    """Context that removes new files in /dev/shm which processes had mapped, when it exits.

    A process that is killed cannot remove its shared memory.
    """

    def __init__(self, folder: Path = SHM) -> None:
        self._folder = folder
        self._before: set[Path] = set()
        self._files: dict[Path, int] = {}  # inodes

    def __enter__(self) -> LeftInShm:
        self._before = set(self._folder.iterdir())
        return self

    def __exit__(self, *_: object) -> None:
        for path, inode in self._files.items():
            with contextlib.suppress(OSError):  # its process has removed it
                if path.stat().st_ino == inode:
                    path.unlink()

    def note(self, pids: Iterable[int]) -> None:
        """Note the files of processes that still run."""
        for pid in pids:
            files = mapped(pid, self._folder)
            self._files |= {path: inode for path, inode in files.items() if path not in self._before}


def mapped(pid: int | str, folder: Path = SHM) -> dict[Path, int]:
    """Return a process's mapped files of `folder`, with their inodes.

    The inode distinguishes a file from a later one of the same name. `pid` may be "self".
    Deleted files are omitted. The result is empty for an exited process, or another user's.
    """
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    inodes = {}
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(f"{folder}/") and not fields[5].endswith(" (deleted)"):
            inodes[Path(fields[5])] = int(fields[4])
    return inodes
