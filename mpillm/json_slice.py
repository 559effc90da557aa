"""The part of a JSON object that matters, as a typed record."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from disagg.errors import ConfigError
from mpillm.files import excerpt, read_json

T = TypeVar("T", bound="Slice")


@dataclass(frozen=True)
class Slice:
    """The part of a JSON object that matters here; other keys are ignored."""

    @classmethod
    def from_json(cls: type[T], data: Any, where: str) -> T:
        """Raise ConfigError, which begins with `where`, for a value of another type than the field's."""
        if not isinstance(data, dict):
            raise ConfigError(f"{where}: {excerpt(data)}; must be an object")
        values: dict[str, Any] = {}
        hints = get_type_hints(cls)
        for known in dataclasses.fields(cls):
            if data.get(known.name) is None or known.name.startswith("_"):
                continue
            kind, value, at = hints[known.name], data[known.name], f"{where}: {known.name}"
            if isinstance(kind, type) and issubclass(kind, Slice):
                values[known.name] = kind.from_json(value, at)
            elif kind == tuple[int, ...] and _is(value, int):
                values[known.name] = (value,)
            elif (
                kind == tuple[int, ...] and isinstance(value, list) and all(_is(item, int) for item in value)
            ):
                values[known.name] = tuple(value)
            elif _is(value, kind):
                values[known.name] = value
            else:
                raise ConfigError(f"{at}: {excerpt(value)}; must be {_KIND_NAMES[kind]}")
        return cls(**values)

    @classmethod
    def from_file(cls: type[T], path: str | Path) -> T:
        """Read a file; ConfigError names it if it cannot be read."""
        return cls.from_json(read_json(Path(path)), str(path))


_KIND_NAMES: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_KIND_NAMES[tuple[int, ...]] = "a whole number, or an array of them"


def _is(value: Any, kind: Any) -> bool:
    return type(value) is kind or (kind is float and type(value) is int)
