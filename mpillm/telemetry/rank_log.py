"""A rank's log file: it receives all that the rank prints, except rank 0's console."""

from __future__ import annotations

import errno
import faulthandler
import os
import sys
from pathlib import Path

from launch.environment import without_secrets
from launch.logs import log_to
from launch.masking import masked_args
from mpillm.files import opened
from mpillm.telemetry import read_log

_TAIL_BYTES = 1 << 16
# Python's names of the fatal signals that it reports.
_FATAL = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
_ON_SIGBUS = "a mapped file is shorter than before, or its storage fails"
_FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_READS = f" INFO {read_log.__name__}: {read_log.READS.removesuffix('%s')}"


def log_name(rank: int) -> str:
    """Return the path of a rank's log in its run directory."""
    return f"ranks/rank_{rank:04d}.log"


def open_rank_log(directory: Path, rank: int) -> Path:
    """Send logging to ``ranks/rank_NNNN.log``, and, unless this is rank 0, stdout and stderr.

    Raises OSError if the file can't be written.
    """
    path = directory / log_name(rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "a", buffering=1, encoding="utf-8", errors="backslashreplace", opener=opened)  # noqa: SIM115
    if directory.stat().st_uid not in (0, os.fstat(file.fileno()).st_uid):
        raise PermissionError(errno.EPERM, "another user's folder", str(directory))
    args, _ = without_secrets(sys.argv)
    print(f"rank {rank}, pid {os.getpid()}: {' '.join(masked_args(args))}", file=file, flush=True)
    if rank != 0:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    log_to(file, _FORM, force=True)
    faulthandler.enable(file)  # a signal that ends the process leaves the threads' stacks
    return path


def how_it_ended(log: Path) -> str:
    """Return the signal that ended the rank of this log, with the evidence; "" if the log is not here."""
    text = _tail(log)
    if text is None:
        return ""
    for name, signal in _FATAL.items():
        if f"Fatal Python error: {name}" in text:
            how = f"{signal} ended it: its log has the stacks"
            why = (_ON_SIGBUS, _last_read(text)) if signal == "SIGBUS" else ()
            return "\n".join(filter(None, (how, *why)))
    return "its log has no cause, as after SIGKILL: by `kill -9`, or the kernel's OOM killer (dmesg)"


def last_read(log: Path) -> str:
    """Return which file the rank of this log read last, for a failure's cause; "" if unknown."""
    return _last_read(_tail(log) or "")


def _last_read(text: str) -> str:
    _, separator, tail = text.rpartition(_READS)
    return f"the file that it read last: {tail.partition(chr(10))[0]}" if separator else ""


def ended_by_a_loss(log: Path) -> bool:
    """Return whether Open MPI crashed in the rank of this log because another rank had exited.

    Open MPI 5.0 does so while it creates a communicator: the communicator has no queues to revoke yet.
    """
    text = _tail(log) or ""
    return "Fatal Python error: Segmentation fault" in text and "ompi_comm_set_rank_failed" in text


def _tail(log: Path) -> str | None:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return None
