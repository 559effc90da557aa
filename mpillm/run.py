"""``python -m mpillm run``: into MPI under a deadline, then `Rank`."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from disagg.errors import ConfigError
from launch.environment import EXIT_FILE, tell_exit_code, told_exit_code
from mpillm.comms.world import launcher_rank, start_mpi
from mpillm.config import RunConfig, parse_run
from mpillm.errors import STOP_SIGNALS, ExitCode, Interrupted
from mpillm.fields import DEADLINES

_LAUNCHER_GRACE_S = 12.0  # after rank 0 has ended: longer than `mpillm mpirun` leaves the others
_SECOND_S = 2.0  # rank 1 speaks so much later than rank 0 would have


def main(argv: Sequence[str]) -> int:
    """``python -m mpillm run`` on one rank. Does not return after a failure: the process ends here, with MPI or without."""
    gc.disable()  # a tenth of the time that importing PyTorch takes; `Rank` enables it when the test begins
    config: RunConfig | None = None
    usage_error = ""
    try:
        config = parse_run(argv)
    except ConfigError as error:
        usage_error = str(error)  # told when all ranks have joined, once
    except OSError as error:
        usage_error = f"{error.filename}: {error.strerror}"
    first = launcher_rank() in ("0", "?")
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # nobody can be told before MPI is there, and a handler could not run inside MPI_Init
    try:
        with _deadline(config.join_deadline if config else float(DEADLINES["join"]), launcher_rank()):
            control = start_mpi()
    except ConfigError as error:
        if first:
            print(f"mpillm: {error}", file=sys.stderr)
            tell_exit_code(ExitCode.USAGE)
        return ExitCode.USAGE
    from mpillm.rank import Rank  # imports mpi4py.MPI, which starts MPI: not before start_mpi has prepared it

    try:
        for number in STOP_SIGNALS:
            signal.signal(number, _interrupt)
        return Rank(control, config, usage_error).live()
    except Interrupted:
        os._exit(ExitCode.NOT_READY)  # while it was ending anyway


@contextlib.contextmanager
def _deadline(seconds: float, rank: str) -> Iterator[None]:
    """End this process if MPI_Init, which waits for every rank and lets no other thread of Python run, takes longer than `seconds`.

    A process beside rank 0 keeps the time and tells the person. Should rank 0 itself be stuck, one beside rank 1 does it a moment later.
    The other ranks end quietly when these should long have ended the run.
    """
    if rank not in ("0", "1", "?"):
        signal.setitimer(signal.ITIMER_REAL, seconds + _LAUNCHER_GRACE_S)  # SIGALRM, which ends a process that does not handle it
        yield
        signal.setitimer(signal.ITIMER_REAL, 0)
        return
    parent = os.getpid()
    wait_end, done_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(done_end)
        patience = seconds + (_SECOND_S if rank == "1" else 0)
        if not select.select([wait_end], [], [], patience)[0]:  # readable at the parent's end, too
            _never_started(seconds, rank)
            os.kill(parent, signal.SIGKILL)
        os._exit(0)
    os.close(wait_end)
    try:
        yield
    finally:
        os.close(done_end)
        os.waitpid(child, 0)


def _never_started(seconds: float, rank: str) -> None:
    exit_file = os.environ.get(EXIT_FILE)
    if rank == "1" and exit_file and told_exit_code(Path(exit_file)) is not None:
        return  # rank 0 has said it
    print(
        f"mpillm: failed in phase 'join'\n  MPI_Init did not end within the deadline of {seconds:g} s: a rank has not started,"
        " or can't be reached",
        file=sys.stderr,
        flush=True,
    )
    tell_exit_code(ExitCode.NOT_READY)


def _interrupt(number: int, frame: object) -> None:
    passed_on = ", by which mpillm mpirun passes on what it got" if number == signal.SIGUSR2 else ""
    raise Interrupted(signal.Signals(number).name + passed_on)
