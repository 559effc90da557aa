"""Checks of the values in a JSON body. An error names the parameter, its value, and the expected value."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from typing import Any

from mpillm.endpoint.api_error import ApiError, Json
from mpillm.files import excerpt

LARGE = 1 << 16
"""Bytes. A larger body is parsed outside the event loop."""
_MAX_PARTS = 1 << 17  # arrays, objects and names: a few bytes in the body, but 100 bytes each in memory
_MAX_VALUES = 1 << 22
_PIECE = 1 << 18  # bytes that are split at quotes in one step, which bounds the memory


def parse(data: bytes) -> Json:
    """Return the JSON object in a body. Raises ApiError if it is not an object, or has too many parts."""
    if len(data) > LARGE and _is_wide([data]) and _is_wide(_outside_strings(data)):
        raise ApiError(400, f"the body has more than {_MAX_PARTS} parts, or {_MAX_VALUES} values")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be an object; it is {_kind(body)}")
    return body


def _is_wide(pieces: Iterable[bytes]) -> bool:
    """Return whether a body has too many parts or values, by the characters that separate them."""
    parts = values = 0
    for piece in pieces:
        parts += piece.count(b"[") + piece.count(b"{") + piece.count(b":")
        values += piece.count(b",")
    return parts > _MAX_PARTS or values > _MAX_VALUES


def _outside_strings(data: bytes) -> Iterator[bytes]:
    """Yield the text of a JSON document without its strings, in pieces. The last string may lack its end."""
    data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    inside = False
    for at in range(0, len(data), _PIECE):
        texts = data[at : at + _PIECE].split(b'"')
        yield b"".join(texts[inside::2])
        inside ^= len(texts) % 2 == 0


def token_ids(value: Any, param: str, vocab_size: int) -> list[int]:
    """Return `value` if it is a list of token ids. Raises ApiError otherwise."""
    if isinstance(value, list):
        if _are_token_ids(value, vocab_size):
            return value
        if _are_token_ids(integers := [_as_integer(one) for one in value], vocab_size):
            return integers
    raise ApiError(400, f"{param}: expected token ids, 0 to {vocab_size - 1}", param)


def _are_token_ids(value: list[Any], vocab_size: int) -> bool:
    return {*map(type, value)} <= {int} and min(value, default=0) >= 0 and max(value, default=0) < vocab_size


def text(value: Any, param: str) -> str:
    """Return `value` if it is a string that can be encoded. Raises ApiError otherwise."""
    if not isinstance(value, str):
        raise ApiError(400, f"{param}: expected a string, got {_kind(value)}", param)
    try:
        value.encode()
    except UnicodeEncodeError:  # the string has one of a pair of \\u escapes
        raise ApiError(
            400, f"{param}: has half of a surrogate pair, which is not a character", param
        ) from None
    return value


def number(
    body: Json, name: str, min_value: float, max_value: float, *, is_integer: bool = False
) -> float | None:
    """Return a number of the body from `min_value` to `max_value`, or None. Raises ApiError otherwise."""
    value = body.get(name)
    if value is None:
        return None
    if is_integer:
        value = _as_integer(value)
    kinds = (int,) if is_integer else (int, float)
    if (
        isinstance(value, bool)
        or not isinstance(value, kinds)
        or not min_value <= value <= max_value
        or not math.isfinite(value)
    ):
        expected = "a whole number" if is_integer else "a number"
        raise ApiError(
            400, f"{name} {excerpt(value)}: expected {expected} from {min_value} to {max_value}", name
        )
    return value


def _as_integer(value: Any) -> Any:
    """Return 5 for 5.0, which is the same number in JSON; other values as they are."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def flag(body: Json, name: str, *, default: bool = False) -> bool:
    """Return a boolean of the body. Raises ApiError for anything else."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApiError(400, f"{name} {excerpt(value)}: expected true or false", name)
    return default if value is None else value


def mapping(body: Json, name: str) -> Json:
    """Return an object of the body, empty by default. Raises ApiError for anything else."""
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise ApiError(400, f"{name} {excerpt(value)}: expected an object", name)
    return value or {}


def _kind(value: Any) -> str:
    names = {
        type(None): "null",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "an array",
        dict: "an object",
    }
    return names[type(value)]
