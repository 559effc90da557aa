"""MPI's shared memory that killed ranks leave in /dev/shm.

`mpillm mpirun` removes it when its ranks have exited. The next start on the host also removes it.

Open MPI has a segment of 16 MiB for each rank, MPICH one of 2 MB or more for each node. A killed rank cannot
remove its segments. Only the ranks' own records identify mpillm's segments, because other programs of this
user also have such segments.

Each rank has a separate folder for Open MPI's segments. Open MPI names them after 16 bits of a hash of
mpirun's process id, and opens existing files. Without the folders, two runs of a user on a host would write
into each other's queues in one case of 65,536.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

from launch.shared_files import SHM, mapped
from launch.siblings import start_ticks, visible_pids

_SHM = SHM
_NAMES = re.compile(r"(?:mpich_shm_|sm_segment\.|vader_segment\.)[\w.\-]+")


class Segment(NamedTuple):
    """A file below /dev/shm. Its inode distinguishes it from a later file of the same name."""

    name: str
    number: int


def _folder() -> Path:
    """Return the folder of the records of this user's ranks, beside the segments."""
    return _SHM / f".mpillm-{os.getuid()}"


def _own_folder(pid: int, started: str) -> Path:
    """Return the folder of a rank's Open MPI segments. It differs for a later process with the same id."""
    return _folder() / f"{pid}-{started}"


def apart() -> dict[str, str]:
    """Make this rank's folder for segments; return the variables that make Open MPI use the folder."""
    if not _record(set()):
        return {}
    folder = _own_folder(os.getpid(), start_ticks(os.getpid()))
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return {}
    return {f"OMPI_MCA_btl_{transport}_backing_directory": str(folder) for transport in ("sm", "vader")}


def note() -> None:
    """Record which segments this rank has, once MPI has started."""
    if own := _mapped("self"):
        _record(own)


def _record(own: set[Segment]) -> bool:
    """Write this rank's record, until Python exits; return whether it exists."""
    here, started = visible_pids(), start_ticks(os.getpid())
    if not here or not started:
        return False
    folder = _folder()
    text = "\n".join([here, started, *(f"{one.number} {one.name}" for one in sorted(own))])
    try:  # if the record cannot be written, the segments of a killed rank remain
        folder.mkdir(mode=0o700, exist_ok=True)
        if not _is_own_folder(folder):
            return False
        (folder / f"{os.getpid()}").write_text(f"{text}\n", encoding="utf-8")
    except OSError:
        return False
    atexit.register(forget)
    return True


def forget() -> None:
    """Delete this rank's record if MPI has removed its segments. If not, the next start removes them."""
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileNotFoundError):
            _own_folder(os.getpid(), start_ticks(os.getpid())).rmdir()
        (_folder() / f"{os.getpid()}").unlink(missing_ok=True)


def sweep() -> None:
    """Remove the segments of exited ranks on this host that no running rank has."""
    folder = _folder()
    if not _is_own_folder(folder):
        return
    here = visible_pids()
    living, ended = set[Segment](), dict[Path, tuple[str, set[Segment]]]()
    for path in folder.iterdir():
        with contextlib.suppress(OSError, ValueError):
            where, started, *lines = path.read_text(encoding="utf-8").splitlines()
            segments = {Segment(name, int(number)) for number, name in (line.split(" ", 1) for line in lines)}
            if where != here or start_ticks(int(path.name)) == started:  # a rank of another container may run
                living |= segments
            else:
                ended[path] = started, segments
    for path, (started, segments) in ended.items():
        own = _own_folder(int(path.name), started)
        with contextlib.suppress(
            OSError
        ):  # a rank that was killed inside MPI_Init has not recorded the segments in its folder
            segments |= {Segment(_name(one), one.lstat().st_ino) for one in own.iterdir()}
        for segment in segments - living:
            _remove(segment)
        with contextlib.suppress(OSError):  # not empty if a rank that it started still runs
            own.rmdir()
        if not own.exists():
            path.unlink(missing_ok=True)


def left_over() -> dict[str, int]:
    """Return the bytes of this user's segments that no visible process has, by name."""
    sizes: dict[Segment, int] = {}
    with contextlib.suppress(OSError):
        for path in (*_SHM.iterdir(), *_folder().glob("*/*")):
            with contextlib.suppress(OSError):
                status = path.lstat()
                if _is_own(path.name, status):
                    sizes[Segment(_name(path), status.st_ino)] = 512 * status.st_blocks  # the file is sparse
    if not sizes:
        return {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and sizes:
            for segment in _mapped(folder.name):
                sizes.pop(segment, None)
    return {segment.name: size for segment, size in sorted(sizes.items())}


def _mapped(pid: int | str) -> set[Segment]:
    """Return the segments that a process has mapped."""
    return {
        Segment(_name(path), number)
        for path, number in mapped(pid, _SHM).items()
        if _NAMES.fullmatch(path.name)
    }


def _name(path: Path) -> str:
    return str(path.relative_to(_SHM))


def _remove(segment: Segment) -> None:
    path = _SHM / segment.name
    with contextlib.suppress(OSError):
        status = path.lstat()
        if _is_own(path.name, status) and status.st_ino == segment.number:
            path.unlink()


def _is_own(name: str, status: os.stat_result) -> bool:
    """Return whether a file in /dev/shm is a segment of this user's."""
    is_file = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
    return is_file and _NAMES.fullmatch(name) is not None


def _is_own_folder(path: Path) -> bool:
    """Return whether `path` is a folder that only this user can write to."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
