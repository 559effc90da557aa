"""The values of a command's options, each with where it came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from mpillm.options.command_line import Parser, add_fields
from mpillm.options.field import Field, Options
from mpillm.options.fields import BY_NAME
from mpillm.options.found import DEFAULT, Found, Level, Origin
from mpillm.options.mitten import Configuration

T = TypeVar("T")
V = TypeVar("V", bound="Values")


class Values(Options):
    """Values of the fields that its class declares, as attributes of their types."""

    def __init__(self, found: Mapping[str, Found]) -> None:
        """`found`: by name."""
        self.found = dict(found)

    def __getitem__(self, field: Field[T]) -> T:
        value: T = self.found[field.name].value
        return value

    @property
    def values(self) -> dict[str, Any]:
        """The values only, by name."""
        return {name: found.value for name, found in self.found.items()}

    def origin(self, name: str) -> Origin:
        """Return where the value came from; `name`: the field's, or one of its other names."""
        return (self.found.get(name) or self.found[BY_NAME[name].name]).origin

    def source(self, name: str) -> str:
        """Return the value's origin: ``command line``, ``file:line``, ``workload X``, ``default``, …"""
        return self.origin(name).where

    def given(self, name: str) -> bool:
        """Return whether the user set it, in another place than a disaggregation YAML."""
        level = self.origin(name).level
        return level >= Level.CONTEXT or level is Level.GENERATION


def collect(argv: Sequence[str], options: type[V], parser: Parser) -> V:
    """Return the values of a command's own `options`, from the command line.

    Raises ConfigError if one is wrong.
    """
    own = options.declared()
    add_fields(parser, own)
    return options(complete(Configuration(options=parser.texts(argv), environ={}), own))


def complete(configuration: Configuration, fields: Iterable[Field]) -> dict[str, Found]:
    """Return the found value of each of `fields`, by name; None, with the default's origin, without one."""
    fields = list(fields)
    found = configuration.resolve(fields)
    return {field.name: found.get(field, Found(None, DEFAULT)) for field in fields}
