"""Conversion of YAML text to plain data and back, stricter than PyYAML's. Each failure is a ConfigError."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from .errors import ConfigError

# Errors that PyYAML does not convert, for input such as `2024-99-99`, `!!int ""` or a number of 5,000 digits.
CONSTRUCTOR_ERRORS = (ValueError, ArithmeticError, LookupError, AttributeError, TypeError)
_MAX_VALUES = 1_000_000
_MAX_QUOTED = 300
_MAX_DEPTH = 100  # brackets within brackets


def read(text: str, source: str) -> Mapping[Any, Any]:
    """Read the one mapping in `text`.

    Raises ConfigError, which begins with `source`, for a syntax error (with line and column), a duplicate
    key, an empty text, several documents, or a top level that is not a mapping.
    """
    data = value_of(text, source)
    if not isinstance(data, dict):
        text = "empty" if data is None else value_text(data)
        raise ConfigError(
            f"{source}: {text}; must be a mapping with context_servers and generation_servers, or executors"
        )
    return data


def value_of(text: str, source: str) -> Any:
    """Read the one value in `text`. Raises ConfigError as `read` does."""
    import yaml

    with _naming_errors(source):
        return yaml.load(text, strict_loader())


def documents(text: str, source: str) -> list[Any]:
    """Read all values in `text`, which lines of ``---`` separate. Raises ConfigError as `read` does."""
    import yaml

    with _naming_errors(source):
        return list(yaml.load_all(text, strict_loader()))


@contextlib.contextmanager
def _naming_errors(source: str) -> Iterator[None]:
    """Convert errors of PyYAML to ConfigError."""
    import yaml

    try:
        yield
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{source}{at}: not valid YAML: {cut(error.problem or error.context)}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {cut(error)}") from error
    except RecursionError as error:
        raise ConfigError(f"{source}: nested too deeply") from error
    except CONSTRUCTOR_ERRORS as error:
        raise ConfigError(f"{source}: a value does not fit its YAML type: {cut(error)}") from error


def cut(error: object) -> str:
    """Return an error's text as one line of limited length, because it may quote a whole file."""
    text = " ".join(str(error).split())
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]} …"


def strict_loader() -> Any:
    """Return PyYAML's safe loader, changed to raise a `ConstructorError` for a duplicate key."""
    import yaml

    class Loader(yaml.SafeLoader):
        def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
            if self.flow_level >= _MAX_DEPTH:  # for each token, PyYAML visits every open bracket
                raise RecursionError
            super().fetch_flow_collection_start(token)

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                    continue
                if (key.tag, key.value) in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"duplicate key {key.value!r}", key.start_mark
                    )
                seen.add((key.tag, key.value))
            mapping: dict[Any, Any] = super().construct_mapping(node, deep)
            return mapping

    return Loader


def write(data: Mapping[str, Any]) -> str:
    """Write `data` as YAML text, without changing the order of keys.

    The text has no anchors, because TensorRT-LLM edits sections in place, so they must share nothing.
    """
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def represent_text(dumper: Dumper, text: str) -> yaml.ScalarNode:
        # In its plain and single-quoted styles, PyYAML changes these Unicode line breaks.
        style = '"' if any(character in text for character in "\x85\u2028\u2029") else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)

    Dumper.add_representer(str, represent_text)
    return str(yaml.dump(data, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120))


def is_text(value: str) -> bool:
    """Return whether a string can be a file's name and content: no incomplete character and no null."""
    try:
        return b"\0" not in value.encode()
    except UnicodeEncodeError:
        return False


def plain(data: Mapping[Any, Any], source: str) -> dict[str, Any]:
    """Return a deep copy of `data` as plain JSON-like data: mappings have string keys, numbers are finite.

    A configuration can then be hashed, compared, sent and written as JSON, whatever an LLM argument contains.
    Raises ConfigError, which begins with `source`, for any other value.
    """
    left = itertools.count(_MAX_VALUES, -1)
    try:
        return {_name(key, source): _plain(value, f"{source}: {key}", left) for key, value in data.items()}
    except RecursionError as error:
        raise ConfigError(f"{source}: nested too deeply, or an alias refers to itself") from error


def _plain(value: Any, where: str, left: Iterator[int]) -> Any:
    """Convert one value. `left` counts down the number of values that are still allowed."""
    if next(left) <= 0:  # a few aliases of aliases can expand to any number of values
        raise ConfigError(f"{where}: more than {_MAX_VALUES} values; do its aliases repeat each other?")
    if (
        value is None
        or isinstance(value, (bool, int, str))
        or (isinstance(value, float) and math.isfinite(value))
    ):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]", left) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {_name(key, where): _plain(item, f"{where}.{key}", left) for key, item in value.items()}
    allowed = "null, true, false, a finite number, a string, a list or a mapping"
    raise ConfigError(f"{where}: {value_text(value)}; must be {allowed}")


def _name(key: object, where: str) -> str:
    if isinstance(key, str):
        return key
    raise ConfigError(f"{where}: the key {value_text(key)}; must be a string")


def value_text(value: object) -> str:
    """Return `value` for an error message: shortened, with its type, because `'2'` is not `2`."""
    if value is None:
        return "null"
    kinds = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "a mapping",
    }
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python can print
        text = "a huge number"
    except RecursionError:
        text = "nested too deeply"
    return (
        f"{text if len(text) <= 80 else text[:77] + '...'} ({kinds.get(type(value), type(value).__name__)})"
    )
