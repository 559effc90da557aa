"""Salts of MLPerf Endpoints: tokens that make each prompt of a performance run unique (rules, 2.9.5).

A salt of 64 bits follows the tokens with which all prompts of the data set begin. So requests can share the
KV cache of this beginning (the system prompt and the chat template), and of nothing else. Accuracy runs have
no salts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpillm.data.tokenizer import FileTokenizer, Tokenizer
from mpillm.files import as_written, read_object, write_json

BITS = 64
SALT_COUNTS = "salts.json"
"""File with the number of tests of each point so far."""
_BYTES = BITS // 8
_MAX_SHARE = 0.5  # of the prompts; a token in more of them may belong to the chat template
Prompt = NDArray[np.int32]


class Salts:
    """Sequence of salts, the same for a seed."""

    def __init__(self, prompts: Sequence[Prompt], tokenizer: Tokenizer, seed: str) -> None:
        """`prompts`: of the whole data set. `tokenizer`: without one, salts are tokens of the prompts."""
        self.after = shared_beginning(prompts)
        self._random = random.Random(seed)
        self._seed = seed
        if isinstance(tokenizer, FileTokenizer):
            opening, closing = tokenizer.encode_plain("["), tokenizer.encode_plain("] ")
            digits = [tokenizer.encode_plain(f"{byte:02x}") for byte in range(256)]
            self._alphabet = [np.array(one, np.int32) for one in digits]
            self._around = np.array(opening, np.int32), np.array(closing, np.int32)
            self._length = _BYTES
        else:
            self._alphabet = [np.array([token], np.int32) for token in _plain_tokens(prompts)]
            self._around = np.zeros(0, np.int32), np.zeros(0, np.int32)
            self._length = math.ceil(BITS / math.log2(len(self._alphabet)))

    def add(self, prompt: Prompt) -> Prompt:
        """Return the prompt with the next salt."""
        number, digits = self._random.getrandbits(BITS), []
        for _ in range(self._length):
            number, digit = divmod(number, len(self._alphabet))
            digits.append(self._alphabet[digit])
        opening, closing = self._around
        return np.concatenate([prompt[: self.after], opening, *digits, closing, prompt[self.after :]])

    def description(self) -> dict[str, Any]:
        """Return the parameters, for the options of a point."""
        return {"bits": BITS, "after_tokens": self.after, "seed": self._seed}


def next_salt_seed(file: Path, model_seed: int, concurrency: int) -> str:
    """Return the seed of a test's salts, from the published one, and count the test in `file`.

    Each test of a point has another seed, also after an interrupted one. Otherwise, a server could have its
    prompts in its prefix cache.
    """
    point = f"{model_seed}/r{concurrency}"
    counts = read_object(file) if file.exists() else {}
    with as_written(file):
        number = int(counts.get(point, 0)) + 1
    write_json(file, counts | {point: number})
    return f"{point}/{number}"


def shared_beginning(prompts: Sequence[Prompt]) -> int:
    """Return the number of tokens with which all prompts begin; 0 for a single prompt."""
    if len(prompts) < 2:
        return 0
    shared = prompts[0]
    for prompt in prompts[1:]:
        n = min(len(shared), len(prompt))
        different = np.flatnonzero(shared[:n] != prompt[:n])
        shared = shared[: different[0] if len(different) else n]
    # A prompt that is the beginning of all others must still have a token behind its salt.
    return min(len(shared), max(0, min(map(len, prompts)) - 1))


def _plain_tokens(prompts: Sequence[Prompt]) -> list[int]:
    """Return tokens of the prompts, without those that may have a meaning in the chat template."""
    tokens, counts = np.unique(np.concatenate([np.unique(prompt) for prompt in prompts]), return_counts=True)
    plain = tokens[counts <= _MAX_SHARE * len(prompts)]
    chosen: list[int] = (plain if len(plain) > 1 else tokens).tolist()
    return chosen if len(chosen) > 1 else [0, 1]
