"""Sources of options' values, and the values of one source."""

from __future__ import annotations

import enum
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from mpillm.options.field import AutoConfStrategy, Field


class Source(enum.IntEnum):
    """The sources of values; a higher one takes precedence."""

    DEFAULT = 0
    WORKLOAD = 1  # a workload's defaults
    GENERATION = 2  # the model's generation config
    YAML = 3  # a section of the disaggregation YAML
    FILE = 4  # the user's configuration file
    ENVIRONMENT = 5
    COMMAND_LINE = 6


class OptionValue(NamedTuple):
    """A value and its source. A dictionary merged from several sources also has the source of each key."""

    value: Any
    source: Source = Source.DEFAULT
    where: str = "default"  # place in the source: ``x.py:12``, ``environment variable X``
    keys: Mapping[str, OptionValue] = {}

    def over(self, below: OptionValue | None, strategy: AutoConfStrategy) -> OptionValue:
        """Return this value, combined with the value of a lower source by `strategy`."""
        if (
            below is None
            or strategy is AutoConfStrategy.Replace
            or not isinstance(self.value, dict)
            or not isinstance(below.value, dict)
        ):
            return self
        return self._replace(value=below.value | self.value, keys=below.all_keys() | self.all_keys())

    def implied(self, name: str, value: Any) -> OptionValue:
        """Return the value that this value of the option or flag `name` implies for another option."""
        return OptionValue(value, self.source, f"{self.where}: {name}")

    def all_keys(self) -> dict[str, OptionValue]:
        """Return the value of each key of a dictionary."""
        return {key: self.key(key) for key in self.value}

    def key(self, name: str) -> OptionValue:
        """Return the value of a dictionary's key; without the key, None with source DEFAULT."""
        if name not in self.value:
            return OptionValue(None)
        return self.keys.get(name) or OptionValue(self.value[name], self.source, self.where)

    def with_key(self, name: str, value: OptionValue) -> OptionValue:
        """Return the dictionary with this key set."""
        return self._replace(value={**self.value, name: value.value}, keys={**self.all_keys(), name: value})

    def without_key(self, name: str) -> OptionValue:
        """Return the dictionary without this key."""
        value, keys = ({k: v for k, v in each.items() if k != name} for each in (self.value, self.keys))
        return self._replace(value=value, keys=keys)


def from_environment(field: Field, variable: str, environ: Mapping[str, str]) -> OptionValue | None:
    """Return the value of `field` in an environment variable; None if the variable is not set.

    Raises ConfigError for a wrong value.
    """
    if (text := environ.get(variable)) is None:
        return None
    where = f"environment variable {variable}"
    return OptionValue(field.parse(text, where), Source.ENVIRONMENT, where)


def default_values(fields: Iterable[Field]) -> dict[str, OptionValue]:
    """Return the default of each field, by name; None for a field without a default."""
    return {field.name: OptionValue(field.default) for field in fields}


def environment_values(
    fields: Iterable[Field], environ: Mapping[str, str] = os.environ
) -> dict[str, OptionValue]:
    """Return the values in fields' environment variables, by name. Raises ConfigError for a wrong value."""
    variables = {field: field.from_environ for field in fields if field.from_environ}
    values = {field.name: from_environment(field, name, environ) for field, name in variables.items()}
    return {name: value for name, value in values.items() if value is not None}


def command_line_values(fields: Iterable[Field], texts: Mapping[str, str]) -> dict[str, OptionValue]:
    """Return the values of a command line's texts, by name. Raises ConfigError for a wrong value."""
    return {
        field.name: OptionValue(field.parse(text, f"--{field.name}"), Source.COMMAND_LINE, COMMAND_LINE)
        for field in fields
        if (text := texts.get(field.name)) is not None
    }


COMMAND_LINE = "command line"
"""The place of values from the command line."""
