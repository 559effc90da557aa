"""Command lines, the programs that they name, and the last lines of a program's output."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from disagg.errors import ConfigError
from launch.environment import clean_environment
from launch.masking import masked_args, masked_value


class NotHere(ConfigError):
    """A requirement of a command is missing on this machine.

    A dry run reports it and prints the commands.
    """


@dataclass(frozen=True)
class Command:
    """A command line in the form that a user types."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)  # variables added to the environment

    def __str__(self) -> str:
        """Return the command line in shell syntax, to copy and paste."""
        return " ".join(self.shell_args())

    def shell_args(self) -> list[str]:
        """Return the command line in shell syntax, environment variables first, with secrets masked."""
        overlay = [f"{name}={shlex.quote(value)}" for name, value in masked_value(self.env).items()]
        return [*overlay, *map(shlex.quote, masked_args(self.argv))]

    def environment(self, keep_job: bool = False) -> dict[str, str]:
        """Return the command's environment: this process's, and a rank's variables only with `keep_job`."""
        return {**(os.environ if keep_job else clean_environment(os.environ)), **self.env}


def wrapped(args: Iterable[str], width: int = 80, indent: str = "") -> str:
    """Wrap a command line at `width` columns. `args`: arguments in shell syntax."""
    lines = [indent]
    for arg in args:
        if lines[-1].strip() and len(lines[-1]) + 1 + len(arg) > width - 2:
            lines.append(f"{indent}    {arg}")
        else:
            lines[-1] += f" {arg}" if lines[-1].strip() else arg
    return " \\\n".join(lines)


def find_program(name: str, hint: str, typed: bool = False, python: str = sys.executable) -> str:
    """Return the path of a program beside this Python or in PATH.

    `typed`: the user has typed the name, so PATH takes precedence, as in a shell. `hint`: how to install the
    program. Raises NotHere if it is missing.
    """
    places = [os.path.dirname(python), os.environ.get("PATH", os.defpath)]  # noqa: PTH120
    if (path := shutil.which(name, path=os.pathsep.join(reversed(places) if typed else places))) is None:
        raise NotHere(f"there is no {name} beside {python} or in PATH; {hint}")
    return path


@dataclass(frozen=True)
class KnownFailure:
    """Meaning of a known line in a program's log."""

    pattern: str  # regular expression for the line
    cause: str
    remedy: str

    def is_in(self, log: str) -> bool:
        """Return whether a line of the log matches."""
        return re.search(self.pattern, log) is not None


def explained(log: str, failures: Iterable[KnownFailure]) -> str:
    """Return the cause and the remedy of the first of `failures` that is in a log; "" if none is."""
    known = next((known for known in failures if known.is_in(log)), None)
    return f"{known.cause}: {known.remedy}" if known else ""
