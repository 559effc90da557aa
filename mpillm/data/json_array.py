"""A data set as one JSON array: its elements, or the error where only lines of JSON can be read."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def not_lines(file: Path, shares: bool) -> str:
    """Return the message, with a command that converts `file`. `shares`: `file` is a ShareGPT file."""
    prompt = 'c["conversations"][0]["value"]' if shares else 'c["prompt"]'
    some = ' if c["conversations"]' if shares else ""
    program = (
        f'import json, sys; [print(json.dumps({{"prompt": {prompt}}})) for c in json.load(sys.stdin){some}]'
    )
    return (
        f"data set {file} is {'a ShareGPT file' if shares else 'a JSON array'}, not JSONL, an object in each"
        f" line; write one{', of the first turns,' if shares else ''} by\n"
        f"  python3 -c '{program}' < {shlex.quote(str(file))} > prompts.jsonl"
    )


def array_rows(text: str) -> Iterator[tuple[int, Any]]:
    """Yield the elements of a JSON array one by one, each with the line of its beginning.

    Raises ValueError with the line and the column of what is wrong.
    """
    decoder, at, line, counted = json.JSONDecoder(), text.index("[") + 1, 1, 0
    separators = "]"  # what may be here in place of an element
    while (at := _after_blanks(text, at)) < len(text) and text[at] not in separators:
        line += text.count("\n", counted, at)
        counted = at
        try:
            element, at = decoder.raw_decode(text, at)
        except RecursionError:
            raise ValueError(f"nested too deep: line {line}") from None
        yield line, element
        at, separators = _after_blanks(text, at), ""
        if text[at : at + 1] != ",":
            break
        at += 1
    if text[at : at + 1] != "]" or text[at + 1 :].strip():
        raise json.JSONDecodeError("Expecting ',' or ']'" if at < len(text) else "truncated", text, at)


def _after_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at
