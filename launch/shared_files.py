"""The files in /dev/shm that a process has mapped: the shared memory of MPI, NCCL and servers' workers."""

from __future__ import annotations

from pathlib import Path

SHM = Path("/dev/shm")


def mapped(pid: int | str, folder: Path = SHM) -> dict[Path, int]:
    """Return a process's mapped files of `folder`, with their inodes.

    The inode distinguishes a file from a later file of the same name. `pid` may be "self".
    Deleted files are omitted. The result is empty for an exited process, and for another user's process.
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
