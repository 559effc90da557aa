"""How a run fails: exit codes, and errors that carry the rank that they are about."""

from __future__ import annotations

import enum
import errno
import signal
from collections.abc import Iterable
from dataclasses import dataclass

from launch.environment import told_signal
from launch.signals import title
from mpillm.phases import Phase

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
    code: int | None = None  # None: by the phase it happened in
    interrupted: bool = False  # by a signal


def exit_code(failures: Iterable[Failure], phase: Phase) -> int:
    """Of a run that ended in `phase`: what the first failure with a code of its own says, otherwise what the phase does."""
    codes = [failure.code for failure in failures if failure.code is not None]
    return int(codes[0]) if codes else int(ExitCode.TEST_FAILED if phase in ("test", "drain", "stop") else ExitCode.NOT_READY)


class RunError(Exception):
    """A failure on its way to the person."""

    def __init__(self, *failures: Failure) -> None:
        super().__init__("; ".join(f.cause for f in failures))
        self.failures = failures


class Interrupted(BaseException):
    """A signal asks to stop; raised in the main thread by its handler. `how`: as a person knows it; the exit code is as a shell's."""

    def __init__(self, how: str, number: int) -> None:
        super().__init__(how)
        self.how = how
        self.exit_code = 128 + number

    @classmethod
    def by_launcher(cls) -> Interrupted | None:
        """By the signal that the launcher got, which passes on another one in its place; None if it got none."""
        told = told_signal()
        return None if told is None else cls(title(told), told)

    def failure(self, rank: int | None = None) -> Failure:
        """Told by `rank`; None: by rank 0, about the whole run."""
        return Failure(f"interrupted ({self.how})", rank, code=None if rank else self.exit_code, interrupted=True)
