"""Check of the run directory's disk on rank 0: can files be written, how many bytes, how fast."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from mpillm.doctor.findings import Line, Status, World, size

_MAX_WRITE = 64 << 20  # bytes
_BLOCK = 1 << 20
_WRITE_S = 1.0
_MIN_FREE = 100_000_000  # bytes
_FREE_GOOD = 1_000_000_000
_RATE_GOOD = 20_000_000  # bytes per second: logs and answers of a fast run

DISK_S = 5.0
"""Time for a file system to answer."""

T = TypeVar("T")

NAME = "run directory"
SHARED = "shared folder"


class DiskFacts(NamedTuple):
    """Result of writing a file to the folder."""

    folder: str  # the run directory, or its nearest parent that exists
    problem: str  # "": the file was written
    free: int  # bytes
    rate: float  # bytes per second that reached the disk


def _existing_folder(log_dir: Path) -> Path:
    """Return the run directory, or its nearest parent that exists."""
    folder = log_dir.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def disk_facts(log_dir: Path) -> DiskFacts:
    """Write a file where the run directory will be, for at most a second, and delete it."""
    folder = _existing_folder(log_dir)
    if not folder.is_dir():
        return DiskFacts(str(folder), "it is a file", 0, 0.0)
    written, started = 0, time.monotonic()
    try:
        with tempfile.TemporaryFile(prefix=".mpillm-doctor-", dir=folder) as file:
            block = os.urandom(_BLOCK)
            while written < _MAX_WRITE and time.monotonic() - started < _WRITE_S:
                written += file.write(block)
            file.flush()
            os.fsync(file.fileno())
        rate = written / max(time.monotonic() - started, 1e-6)
        return DiskFacts(str(folder), "", shutil.disk_usage(folder).free, rate)
    except OSError as error:
        return DiskFacts(str(folder), error.strerror or str(error), 0, 0.0)


def within(seconds: float, work: Callable[[], T]) -> T | None:
    """Return the result of `work`; None after `seconds`, and the thread of `work` is left behind."""
    done: list[T] = []
    thread = threading.Thread(target=lambda: done.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    return done[0] if done else None


def disk_line(
    log_dir: Path, facts_of: Callable[[Path], DiskFacts] = disk_facts, seconds: float = DISK_S
) -> Line:
    """Return the line of the run directory's disk, which may hang."""
    return run_directory(within(seconds, lambda: facts_of(log_dir)))


def run_directory(facts: DiskFacts | None) -> Line:
    """Return the line of the disk. `facts`: None if the disk did not answer."""
    if facts is None:
        return Line(
            NAME, Status.FAILURE, "writing there takes for ever: a network file system that hangs?",
            "name another folder with --log_dir",
        )  # fmt: skip
    elsewhere = "name another folder with --log_dir"
    if facts.problem:
        return Line(NAME, Status.FAILURE, f"{facts.folder} can't be written: {facts.problem}", elsewhere)
    text = f"{facts.folder}: {size(facts.free)} free, {size(facts.rate)}/s written"
    figures = {"folder": facts.folder, "free_bytes": facts.free, "bytes_per_s": round(facts.rate)}
    if facts.free < _MIN_FREE:
        return Line(NAME, Status.FAILURE, text, f"free some space, or {elsewhere}", (), figures)
    if facts.free < _FREE_GOOD or facts.rate < _RATE_GOOD:
        return Line(NAME, Status.WARNING, text, f"a long run may stall: {elsewhere}", (), figures)
    return Line(NAME, Status.OK, text, "", (), figures)


class Beacon(NamedTuple):
    """A file by which other nodes recognize a folder that they share with this node."""

    path: Path

    @classmethod
    def light(cls, log_dir: Path) -> Beacon | None:
        """Write it where the run directory will be; None: nothing can be written there."""
        try:
            number, name = tempfile.mkstemp(prefix=".mpillm-doctor-", dir=_existing_folder(log_dir))
        except OSError:
            return None
        os.close(number)
        return cls(Path(name))

    def put_out(self) -> None:
        """Delete it."""
        self.path.unlink(missing_ok=True)


def shared_lines(folder: Path, seen: Mapping[int, bool | None], world: World) -> list[Line]:
    """Return lines that list the nodes that share rank 0's folder; not sharing it is not a fault.

    `seen`: by the first rank of each other node; None: no answer.
    """
    unshared = [rank for rank, sees in seen.items() if sees is False]
    hung = [rank for rank, sees in seen.items() if sees is None]
    figures = {"folder": str(folder), "seen_on": sorted(world.nodes[rank] for rank in seen if seen[rank])}
    lines = []
    if hung:
        text = f"to look into {folder} takes for ever: a network file system that hangs?"
        lines.append(Line(SHARED, Status.FAILURE, text, "name another folder with --log_dir", tuple(hung)))
    if unshared:
        text = (
            f"{folder} is not rank 0's there: ranks write their logs to a folder of that name on their own"
            " node, and models and configuration files must be on every node"
        )
        lines.append(Line(SHARED, Status.OK, text, "", tuple(unshared), figures))
    if not unshared and not hung:
        lines.append(Line(SHARED, Status.OK, f"all nodes see rank 0's {folder}", "", (), figures))
    return lines
