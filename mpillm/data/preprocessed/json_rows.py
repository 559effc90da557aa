"""A data frame as a JSON file: a list of objects with the same keys, as llama3.1-8b's ``cnn_eval.json``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from disagg.errors import ConfigError

_CHUNK = 1 << 20  # characters
_BETWEEN = re.compile(r"[\s,]*")


def json_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of the list in `file`; lists of integers become arrays, shape [length], int32.

    The file is read piece by piece: it has hundreds of megabytes, a token to a line. Raises ConfigError if it
    can't be read, is cut, or holds something else.
    """
    try:
        with file.open(encoding="utf-8-sig") as stream:
            decode = json.JSONDecoder(object_hook=_packed).raw_decode
            text = stream.read(_CHUNK).lstrip()
            if not text.startswith("["):
                raise ConfigError(f"{file}: not a JSON list of objects, which a data set is")
            place = 1
            while True:
                if (match := _BETWEEN.match(text, place)) is not None:
                    place = match.end()
                if text.startswith("]", place):
                    return
                try:
                    row, end = decode(text, place)
                except ValueError as error:  # perhaps only because there is more to read
                    # twice as much: a long row is not read again for each piece of it
                    if not (more := stream.read(max(_CHUNK, len(text) - place))):
                        raise ConfigError(f"{file}: truncated, or not JSON: {error}") from None
                    text, place = text[place:] + more, 0
                    continue
                except RecursionError:
                    raise ConfigError(f"{file}: not a data set: nested too deep") from None
                if not isinstance(row, dict):
                    raise ConfigError(f"{file}: not a JSON list of objects, which a data set is")
                yield row
                place = end
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8: {error}") from None
    except OSError as error:
        raise ConfigError(f"data set {file} cannot be read: {error.strerror}") from None


def _packed(entry: dict[str, Any]) -> dict[str, Any]:
    """Replace lists of integers that fit int32 by arrays, which take a tenth of the memory."""
    for name, value in entry.items():
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            continue
        if value and min(value) >= -(2**31) and max(value) < 2**31:
            entry[name] = np.array(value, np.int32)
    return entry
