"""The command line of an operation: options of its call, of the process, and of the active configuration."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from disagg.errors import ConfigError, nearest
from mpillm.options.field import Field
from mpillm.options.fields import BY_NAME, FIELDS
from mpillm.options.mitten import current, option_texts


def command_line(options: Mapping[str, Any]) -> list[str]:
    """Return this process's arguments, then `options` and the options of the active configuration.

    `options` override the arguments, which override the configuration. Raises ConfigError for an unknown name
    or a wrong value.
    """
    values = {_field(name): value for name, value in options.items()}
    typed = option_texts(FIELDS, sys.argv[1:])
    for field, value in (current() or {}).items():
        if field.name not in typed and field in FIELDS and value is not None:
            values.setdefault(field, value)
    added = (
        f"--{field.name}={field.text(field.check(value, field.name))}" for field, value in values.items()
    )
    return [*sys.argv[1:], *added]


def _field(name: str) -> Field:
    if name not in BY_NAME:
        raise ConfigError(f"there is no option {name}{nearest(name, BY_NAME)}")
    return BY_NAME[name]
