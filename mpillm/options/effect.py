"""For whom a field has an effect: which commands, cores and scenarios, and beside which other options."""

from __future__ import annotations

import dataclasses
from typing import Any

ANY = object()
"""As the value of `Use.needs`: any that is set."""


@dataclasses.dataclass(frozen=True)
class Use:
    """A place where a value is used. What is empty holds for all."""

    commands: tuple[str, ...] = ()
    cores: tuple[str, ...] = ()
    scenarios: tuple[str, ...] = ()
    needs: tuple[str, Any] | None = None  # another option or build flag, and the value that it must have


@dataclasses.dataclass(frozen=True)
class Effect:
    """All uses of a value. None: it is taken, and never used."""

    uses: tuple[Use, ...] = (Use(),)
    measured: bool = True  # what a run measures depends on it: stated in vain, it is an error
    instead: str = ""  # what does what it was meant for


EVERYWHERE = Effect()
