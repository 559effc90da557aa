"""How a run fails: exit codes, and errors that carry their rank."""

from __future__ import annotations

import contextlib
import enum
import errno
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from disagg.errors import ConfigError
from launch.environment import read_signal
from launch.signals import title
from mpillm.phases import Phase

# A full disk, a quota, a limit on file sizes: not a wrong option.
STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ExitCode(enum.IntEnum):
    """The exit code of a command. A test that is INVALID is DONE without --require_valid."""

    DONE = 0
    STAGE_FAILED = 1  # a stage of the pipeline: a quantisation, a build
    USAGE = 2  # bad usage or configuration
    NOT_READY = 3
    TEST_FAILED = 4
    INSTANCE_LOST = 5


def missing_package(error: Exception) -> str:
    """Return the package that an import did not find; "" for another error, or a part of mpillm.

    Some packages raise RuntimeError instead, such as tritonclient without its extra ``grpc``.
    """
    cause = error.__cause__ if isinstance(error, RuntimeError) else error
    name = (cause.name or "") if isinstance(cause, ModuleNotFoundError) else ""
    return "" if name.partition(".")[0] in ("mpillm", "disagg", "launch") else name


@contextlib.contextmanager
def needs_extra(user: str, extra: str) -> Iterator[None]:
    """Say which package is missing, and how to install it, if the block can't import one.

    `extra`: of mpillm's, which brings it. Raises ConfigError.
    """
    try:
        yield
    except (ModuleNotFoundError, RuntimeError) as error:
        if not (package := missing_package(error)):
            raise
        raise ConfigError(f"{user} needs the package '{package}': pip install 'mpillm[{extra}]'") from error


class StageError(Exception):
    """A stage of the pipeline failed, although its input was right. Exit code STAGE_FAILED."""


@dataclass(frozen=True)
class Failure:
    """Why a run ends, as data that the failed rank sends to rank 0, which prints it once."""

    cause: str  # one line or a few, without a traceback
    rank: int | None = None  # where it failed; None: nowhere (a wrong option, an interrupt)
    traceback: str = ""
    code: int | None = None  # None: determined by the phase
    interrupted: bool = False  # by a signal
    ended: bool = False  # the rank's process has, without a message
    may_follow: bool = False  # from another rank's failure, whose message is then better
    seen: bool = False  # its rank has detected the cause itself: no other failure is better
    report: Any = None  # a `DrainReport` of the rank, if a signal ends it in the test
    doctor: str = ""  # the line of `mpillm doctor` that explains it; "" if none does


def exit_code(failures: Iterable[Failure], phase: Phase) -> int:
    """Return the exit code of a run that failed in `phase`: the first failure's, or else the phase's."""
    codes = [failure.code for failure in failures if failure.code is not None]
    return (
        int(codes[0])
        if codes
        else int(ExitCode.TEST_FAILED if phase in ("test", "drain", "stop") else ExitCode.NOT_READY)
    )


class RunError(Exception):
    """Failures on their way to rank 0's message."""

    def __init__(self, *failures: Failure) -> None:
        super().__init__("; ".join(f.cause for f in failures))
        self.failures = failures


class InterruptError(BaseException):
    """A signal asks to stop; its handler raises this in the main thread.

    `how`: the signal's common name. The exit code is 128 plus its number, as in a shell.
    """

    def __init__(self, how: str, number: int) -> None:
        super().__init__(how)
        self.how = how
        self.exit_code = 128 + number

    @classmethod
    def by_launcher(cls) -> InterruptError | None:
        """Return an interrupt by the signal that the launcher got and passed on as another one; None if it
        got none."""
        number = read_signal()
        return None if number is None else cls(title(number), number)

    def failure(self, rank: int | None = None) -> Failure:
        """Return the failure to report from `rank`; None: from rank 0, about the whole run."""
        code = None if rank else self.exit_code
        return Failure(f"interrupted ({self.how})", rank, code=code, interrupted=True)
