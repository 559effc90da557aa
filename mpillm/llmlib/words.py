"""The command line of an operation: the options of its call, of the process, and in force."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from disagg.errors import ConfigError, nearest
from mpillm.options.field import Field
from mpillm.options.fields import BY_NAME, FIELDS
from mpillm.options.mitten import current, option_texts


def command_line(options: Mapping[str, Any]) -> list[str]:
    """Return this process's arguments, then `options`, and those of the configuration in force.

    The first of these that states one wins: `options`, the arguments, the configuration. Raises ConfigError
    for a name that is no option's, or a wrong value.
    """
    values = {_field(name): value for name, value in options.items()}
    typed = option_texts(FIELDS, sys.argv[1:])
    for field, value in (current() or {}).items():
        if field.name not in typed and field in FIELDS and value is not None:
            values.setdefault(field, value)
    stated = (
        f"--{field.name}={field.text(field.check(value, field.name))}" for field, value in values.items()
    )
    return [*sys.argv[1:], *stated]


def _field(name: str) -> Field:
    if name not in BY_NAME:
        raise ConfigError(f"there is no option {name}{nearest(name, BY_NAME)}")
    return BY_NAME[name]
