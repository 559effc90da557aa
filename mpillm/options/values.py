"""The values of a command's options, each with its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from mpillm.options.command_line import Parser, add_fields
from mpillm.options.field import Field, Options
from mpillm.options.fields import BY_NAME
from mpillm.options.sources import OptionValue, Source, command_line_values, default_values

T = TypeVar("T")
V = TypeVar("V", bound="Values")


class Values(Options):
    """Values of the fields that the class declares. Each is an attribute with the field's type."""

    def __init__(self, option_values: Mapping[str, OptionValue]) -> None:
        """`option_values`: values and sources by option name."""
        self.option_values = dict(option_values)

    def __getitem__(self, field: Field[T]) -> T:
        value: T = self.option_values[field.name].value
        return value

    @property
    def values(self) -> dict[str, Any]:
        """The values without their sources, by name."""
        return {name: one.value for name, one in self.option_values.items()}

    def option_value(self, name: str) -> OptionValue:
        """Return the value with its source; `name`: the field's, or one of its other names."""
        return self.option_values.get(name) or self.option_values[BY_NAME[name].name]

    def where(self, name: str) -> str:
        """Return where the value was set: ``command line``, ``file:line``, ``workload X``, ``default``, …"""
        return self.option_value(name).where

    def is_user_set(self, name: str) -> bool:
        """Return whether the user set the option outside a disaggregation YAML."""
        source = self.option_value(name).source
        return source >= Source.FILE or source is Source.GENERATION


def collect(argv: Sequence[str], options: type[V], parser: Parser) -> V:
    """Return the values of a command's own `options`, from the command line.

    Raises ConfigError if a value is wrong.
    """
    own = options.declared()
    add_fields(parser, own)
    return options(own_values(own, parser.texts(argv)))


def own_values(fields: Sequence[Field], texts: Mapping[str, str]) -> dict[str, OptionValue]:
    """Return the values of a command's own options, by name: from a command line's texts, or defaults."""
    return default_values(fields) | command_line_values(fields, texts)
