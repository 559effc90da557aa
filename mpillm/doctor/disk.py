"""The disk of the run directory, on rank 0: whether files can be written there, how many, how fast."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from mpillm.doctor.findings import Line, Status, size

_WRITE = 64 << 20  # bytes at most
_BLOCK = 1 << 20
_WRITE_S = 1.0
_FREE_LEAST = 100_000_000  # bytes
_FREE_GOOD = 1_000_000_000
_RATE_GOOD = 20_000_000  # bytes per second: logs and answers of a fast run

NAME = "run directory"


class DiskFacts(NamedTuple):
    """What a file in the folder met."""

    folder: str  # the run directory, or the folder above it that is there
    problem: str  # "": it could be written
    free: int  # bytes
    rate: float  # bytes per second that reached the disk


def disk_facts(log_dir: Path) -> DiskFacts:
    """Write a file where the run directory will be, for a second at most, and delete it."""
    folder = log_dir.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        return DiskFacts(str(folder), "it is a file", 0, 0.0)
    written, started = 0, time.monotonic()
    try:
        with tempfile.TemporaryFile(prefix=".mpillm-doctor-", dir=folder) as file:
            block = os.urandom(_BLOCK)
            while written < _WRITE and time.monotonic() - started < _WRITE_S:
                written += file.write(block)
            file.flush()
            os.fsync(file.fileno())
        rate = written / max(time.monotonic() - started, 1e-6)
        return DiskFacts(str(folder), "", shutil.disk_usage(folder).free, rate)
    except OSError as error:
        return DiskFacts(str(folder), error.strerror or str(error), 0, 0.0)


def run_directory(facts: DiskFacts | None) -> Line:
    """None: the disk did not answer."""
    if facts is None:
        return Line(
            NAME, Status.FAILURE, "writing there takes for ever: a network file system that hangs?",
            "name another folder with --log_dir",
        )  # fmt: skip
    elsewhere = "name another folder with --log_dir"
    if facts.problem:
        return Line(NAME, Status.FAILURE, f"{facts.folder} can't be written: {facts.problem}", elsewhere)
    told = f"{facts.folder}: {size(facts.free)} free, {size(facts.rate)}/s written"
    figures = {"folder": facts.folder, "free_bytes": facts.free, "bytes_per_s": round(facts.rate)}
    if facts.free < _FREE_LEAST:
        return Line(NAME, Status.FAILURE, told, f"free some space, or {elsewhere}", (), figures)
    if facts.free < _FREE_GOOD or facts.rate < _RATE_GOOD:
        return Line(NAME, Status.WARNING, told, f"a long run may stall: {elsewhere}", (), figures)
    return Line(NAME, Status.OK, told, "", (), figures)
