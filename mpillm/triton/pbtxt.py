"""Write protobuf's text format, used by Triton's `config.pbtxt`.

A message is a dictionary, a repeated field a list, an enum an `EnumName`. Strings, numbers and booleans are
plain values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}


class EnumName(str):
    """Value of an enum, written without quotes."""


def dump(message: Mapping[str, Any]) -> str:
    """Return the text of a message, one field per line."""
    return "".join(_field(name, value, "") for name, value in message.items())


def _field(name: str, value: Any, indent: str) -> str:
    if isinstance(value, (list, tuple)):
        if value and not any(isinstance(item, Mapping) for item in value):
            return f"{indent}{name}: [{', '.join(map(scalar, value))}]\n"
        return "".join(_field(name, item, indent) for item in value)
    if isinstance(value, Mapping):
        inner = "".join(_field(key, item, indent + "  ") for key, item in value.items())
        return f"{indent}{name} {{\n{inner}{indent}}}\n"
    return f"{indent}{name}: {scalar(value)}\n"


def scalar(value: Any) -> str:
    """Return the text of a value other than a message."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, EnumName):
        return str(value)
    if isinstance(value, str):
        return f'"{"".join(map(_escaped, value))}"'
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return repr(value)
    raise TypeError(f"{value!r} has no text in protobuf's format")


def _escaped(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    # Other characters are the octal of their UTF-8 bytes; bytes of a command line may be invalid UTF-8.
    if " " <= character <= "~":
        return character
    return "".join(f"\\{byte:03o}" for byte in character.encode(errors="surrogateescape"))
