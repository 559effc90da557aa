"""Data sets of TensorRT-LLM's backend: a JSON list of objects with `input`, `instruction` and `output`."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from disagg.errors import ConfigError
from mpillm.files import read_json

TOKENS_PER_WORD = 1.3
"""What the scripts reckon with."""


class Prompt(NamedTuple):
    """Holds a prompt, and how many tokens its answer may have."""

    text: str
    output_len: int


def read_prompts(path: Path, tokens_per_word: float = TOKENS_PER_WORD) -> list[Prompt]:
    """Return the prompts of a file; an answer may be as long as the one in the file.

    Raises ConfigError if the file is wrong.
    """
    entries = read_json(path)
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: expected a JSON list of objects with input, instruction and output")
    prompts = []
    for index, entry in enumerate(entries):
        try:
            text = f"{entry['input']} {entry['instruction']}"
            words = len(str(entry["output"]).split(" "))
        except (TypeError, KeyError) as error:
            raise ConfigError(f"{path}: entry {index}: no {error} in it") from None
        prompts.append(Prompt(text, max(1, int(words * tokens_per_word))))
    return prompts
