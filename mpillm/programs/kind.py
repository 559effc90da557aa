"""A kind of program that a run starts: arguments, environment, known failures, installation."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

from launch.command import Command, KnownFailure, explained, find_program

Spec = TypeVar("Spec")
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, kw_only=True)
class ProgramKind(Generic[Spec]):
    """A kind of program; a `Spec` describes one program of the kind."""

    name: str
    arguments: Callable[[Spec], Sequence[str]]  # its argv, the program first; raises ValueError
    environment: Mapping[str, str] = field(default_factory=dict)  # added to this process's
    failures: tuple[KnownFailure, ...] = ()  # that only this kind has
    install: str = ""  # what to do if the program is missing

    common_failures: ClassVar[tuple[KnownFailure, ...]] = ()

    @property
    def short_name(self) -> str:
        """The name as messages have it."""
        return self.name.rstrip(":")

    def command(self, spec: Spec) -> Command:
        """Return the command line. Raises ValueError, with the option that this kind cannot satisfy."""
        return Command(tuple(self.arguments(spec)), self.environment)

    def located(self, command: Command) -> Command:
        """Return the command line with the path of its program. Raises NotHere."""
        program = find_program(command.argv[0], self.install or "name it by its path", typed=True)
        return Command((program, *command.argv[1:]), command.env)

    def explain(self, log: str) -> str:
        """Return the meaning of a known failure in a log, and the remedy; "" if the log has none."""
        return explained(log, (*self.failures, *self.common_failures))


def placeholders(template: Sequence[str], values: Mapping[str, Callable[[Spec], object]]) -> set[str]:
    """Return the names in ``{}`` in a user's command line. Raises ValueError if one has no value."""
    names = {name for arg in template for name in _PLACEHOLDER.findall(arg)}
    if unknown := sorted(names - values.keys()):
        raise ValueError(f"{{{unknown[0]}}} is none of {', '.join(f'{{{name}}}' for name in values)}")
    return names


def filled(
    template: Sequence[str], values: Mapping[str, Callable[[Spec], object]], spec: Spec
) -> tuple[str, ...]:
    """Return a user's command line with the values of a program in place of the names in ``{}``."""
    return tuple(_PLACEHOLDER.sub(lambda match: str(values[match[1]](spec)), arg) for arg in template)
