"""Where a field has an effect: with which commands, cores, scenarios and other options."""

from __future__ import annotations

import dataclasses
from typing import Any

ANY = object()
"""As the value of `Use.needs`: any value."""


@dataclasses.dataclass(frozen=True)
class Use:
    """A use of a value; an empty field means all."""

    commands: tuple[str, ...] = ()
    cores: tuple[str, ...] = ()
    scenarios: tuple[str, ...] = ()
    needs: tuple[str, Any] | None = None  # another option or build flag, and the value that it must have


@dataclasses.dataclass(frozen=True)
class Effect:
    """All uses of a value. None: it is accepted, and never used."""

    uses: tuple[Use, ...] = (Use(),)
    measured: bool = True  # the results of a run depend on it: to set it without effect is an error
    instead: str = ""  # its replacement


EVERYWHERE = Effect()
