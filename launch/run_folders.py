"""Temporary folders of an `mpillm mpirun`: Open MPI's session folder, and the folder of rank 0's exit code.

A command that is killed leaves its folders. The next command on the host removes them, and so does the owner
of a server that is itself an `mpillm mpirun`. A folder's name contains the id of the process that created it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from launch.siblings import start_ticks, visible_pids

_NAME = re.compile(r"\.mpillm-([0-9a-f]{8})-([1-9][0-9]{0,9})-([0-9]{1,20})-\w+")


@contextlib.contextmanager
def temporary(parent: Path | None = None) -> Iterator[str]:
    """Make a folder in `parent` (None: TMPDIR), and remove it after the `with` block."""
    prefix = f".mpillm-{_place()}-{os.getpid()}-{start_ticks(os.getpid()) or 0}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as folder:
        yield folder


def sweep() -> None:
    """Remove the folders of this user's processes that have ended, in TMPDIR and in the working directory."""
    with contextlib.suppress(OSError):
        for parent in {Path(tempfile.gettempdir()), Path.cwd()}:
            for path in parent.glob(".mpillm-*"):
                if _is_left(path):
                    shutil.rmtree(path, ignore_errors=True)


def _place() -> str:
    """Return a short name of this process's host or container, whose processes it can see."""
    return hashlib.sha256(visible_pids().encode()).hexdigest()[:8]


def _is_left(path: Path) -> bool:
    name = _NAME.fullmatch(path.name)
    if name is None or not visible_pids() or name[1] != _place():
        return False  # the process may live on another host, or in another container
    status = path.lstat()
    return (
        stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and start_ticks(int(name[2])) != name[3]
    )
