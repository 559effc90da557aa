"""Data sets of TensorRT-LLM's backend: a JSON list of objects with `input`, `instruction` and `output`."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from disagg.errors import ConfigError
from mpillm.files import read_json

TOKENS_PER_WORD = 1.3
"""Estimate of NVIDIA's scripts."""


class Prompt(NamedTuple):
    """A prompt, and the maximum tokens of its answer."""

    text: str
    output_len: int


def read_prompts(path: Path, tokens_per_word: float = TOKENS_PER_WORD) -> list[Prompt]:
    """Read a prompts file; the lengths of its outputs limit the answers. Raises ConfigError."""
    entries = read_json(path)
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: expected a JSON list of objects with input, instruction and output")
    prompts = []
    for index, entry in enumerate(entries):
        try:
            text = f"{entry['input']} {entry['instruction']}"
            word_count = len(str(entry["output"]).split(" "))
        except (TypeError, KeyError) as error:
            raise ConfigError(f"{path}: entry {index}: no {error} in it") from None
        prompts.append(Prompt(text, max(1, int(word_count * tokens_per_word))))
    return prompts
