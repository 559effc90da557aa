"""How a run fails: exit codes, and errors that carry the rank that they are about."""

from __future__ import annotations

import enum
import errno
import signal
from dataclasses import dataclass

# SIGUSR2 is how `mpillm mpirun` passes Ctrl-C on under Open MPI, whose mpirun leaves ranks no time after SIGINT or SIGTERM.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)

# A disk that is full, a quota, a limit on sizes: no wrong option.
STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ExitCode(enum.IntEnum):
    """What the command returns. LoadGen's INVALID verdict is DONE unless --require_valid was given."""

    DONE = 0
    STAGE_FAILED = 1  # a stage of the pipeline: a quantisation, a build
    USAGE = 2  # bad usage or configuration
    NOT_READY = 3
    TEST_FAILED = 4
    INSTANCE_LOST = 5


class StageError(Exception):
    """A stage of the pipeline failed, although its input was right when it began. Printed as it is; exit code STAGE_FAILED."""


@dataclass(frozen=True)
class Failure:
    """Why a run ends, as data: it travels from the rank that failed to rank 0, which prints it once."""

    cause: str  # one line or a few, without a traceback
    rank: int | None = None  # whose fault it is; None: nobody's (a wrong option, an interrupt)
    traceback: str = ""
    code: ExitCode | None = None  # None: by the phase it happened in
    interrupted: bool = False


class RunError(Exception):
    """A failure on its way to the person."""

    def __init__(self, *failures: Failure) -> None:
        super().__init__("; ".join(f.cause for f in failures))
        self.failures = failures


class Interrupted(BaseException):
    """SIGINT or SIGTERM arrived; raised in the main thread by the signal handler."""

    def __init__(self, signal_name: str) -> None:
        super().__init__(signal_name)
        self.signal_name = signal_name
