"""What a value is, and where it came from."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

from mpillm.options.field import AutoConfStrategy


class Level(enum.IntEnum):
    """The sources of values: the higher wins."""

    DEFAULT = 0
    WORKLOAD = 1  # a workload's defaults
    GENERATION = 2  # the model's generation config
    YAML = 3  # a section of the disaggregation YAML
    CONTEXT = 4  # a configuration: a file's, or the one in force
    ENVIRONMENT = 5
    COMMAND_LINE = 6


class Origin(NamedTuple):
    """Where a value came from: ``command line``, ``environment variable X``, ``x.py:12`` or ``default``."""

    level: Level
    where: str


DEFAULT = Origin(Level.DEFAULT, "default")
CONFIGURATION = Origin(Level.CONTEXT, "configuration")
COMMAND_LINE = Origin(Level.COMMAND_LINE, "command line")


class Found(NamedTuple):
    """A value and its origin; for a dictionary merged from several, the origin of each key."""

    value: Any
    origin: Origin
    keys: Mapping[str, Origin] = {}

    def over(self, below: Found | None, strategy: AutoConfStrategy) -> Found:
        """Return this value over the one of a lower source."""
        if (
            below is None
            or strategy is AutoConfStrategy.Replace
            or not isinstance(self.value, dict)
            or not isinstance(below.value, dict)
        ):
            return self
        return Found(
            {**below.value, **self.value}, self.origin, {**below.key_origins(), **self.key_origins()}
        )

    def key_origins(self) -> dict[str, Origin]:
        """Return where each key of a dictionary came from."""
        return {key: self.keys.get(key, self.origin) for key in self.value}

    def key(self, name: str) -> Found:
        """Return the value of a dictionary's key; None, with the origin of defaults, without it."""
        return (
            Found(self.value[name], self.keys.get(name, self.origin))
            if name in self.value
            else Found(None, DEFAULT)
        )

    def with_key(self, name: str, found: Found) -> Found:
        """Return the dictionary with this key set."""
        return Found(
            {**self.value, name: found.value}, self.origin, {**self.key_origins(), name: found.origin}
        )

    def without_key(self, name: str) -> Found:
        """Return the dictionary without this key."""
        kept = {key: value for key, value in self.value.items() if key != name}
        return Found(kept, self.origin, {key: origin for key, origin in self.keys.items() if key != name})
