"""The files in /dev/shm that a process has mapped: the shared memory of MPI, NCCL and servers' workers."""

from __future__ import annotations

from pathlib import Path

SHM = Path("/dev/shm")


def mapped(pid: int | str, folder: Path = SHM) -> dict[Path, int]:
    """Return the files of `folder` that a process has, with their inodes, which tell them from later ones.

    `pid` may be "self". None are returned of a process that is no more, or another user's, or of files that
    are deleted already.
    """
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        words = line.split(maxsplit=5)
        if len(words) == 6 and words[5].startswith(f"{folder}/") and not words[5].endswith(" (deleted)"):
            found[Path(words[5])] = int(words[4])
    return found
