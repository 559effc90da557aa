"""The error for a JSON array where lines of JSON or a published data set are expected."""

from __future__ import annotations

import shlex
from pathlib import Path


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
