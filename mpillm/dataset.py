"""The samples of a test: their prompts as tokens, all back to back in one array.

A data set is a JSONL file with ``{"prompt": "text"}`` or ``{"input_tokens": [1, 2, 3]}`` on each line, the prompts that come with the
program, or synthetic: random tokens with lengths from a normal distribution.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError, nearest
from mpillm.messages import ragged_take
from mpillm.tokenizer import Tokenizer

BUILTIN_PROMPTS = Path(__file__).parent / "data" / "prompts.jsonl"

_KEYS = ("prompt", "input_tokens")
_ENCODE_BATCH = 4096  # prompts that are tokenized together: bounds the memory of the tokenizer's results


@dataclass(frozen=True, slots=True)
class Dataset:
    """Sample i's prompt is ``tokens[offsets[i]:offsets[i + 1]]``."""

    name: str  # of the file, or `synthetic`
    tokens: NDArray[np.int32]
    offsets: NDArray[np.int64]  # shape [samples + 1]
    output_lengths: NDArray[np.int64] | None = None  # tokens to generate, sample by sample, where the data set says so
    texts: Mapping[int, str] = field(default_factory=dict)  # the prompts that were given as text, by sample

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def lengths(self) -> NDArray[np.int64]:
        """Prompt tokens of every sample."""
        return np.diff(self.offsets)

    def sample(self, index: int) -> NDArray[np.int32]:
        """The prompt of one sample (a view)."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def gather(self, indices: NDArray[np.integer[Any]]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The prompts of these samples as lengths and one array of tokens, in the order of `indices`."""
        starts = self.offsets[indices]
        lengths = self.offsets[np.add(indices, 1)] - starts
        return lengths, ragged_take(self.tokens, starts, lengths)


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Random prompts: lengths are normal, rounded, and at least 1; tokens are uniform over `Tokenizer.plain_tokens`."""

    input_mean: float
    output_mean: float
    input_stdev: float = 0.0
    output_stdev: float = 0.0
    num_samples: int = 1024
    seed: int = 0


def load_dataset(
    source: Path | Synthetic | None,
    tokenizer: Tokenizer,
    *,
    vocab_size: int | None = None,
    max_seq_len: int | None = None,
    max_output_len: int = 1,
) -> Dataset:
    """The data set in a JSONL file, a synthetic one, or (None) the prompts that come with the program.

    `vocab_size` is the model's, the tokenizer's where there is no model. ConfigError names the file and the line of whatever is wrong, a
    prompt that leaves no room in `max_seq_len` for `max_output_len` tokens (for a synthetic sample: its own output length) included.
    """
    vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
    if isinstance(source, Synthetic):
        return _synthetic(source, tokenizer, vocab_size, max_seq_len)
    file = BUILTIN_PROMPTS if source is None else source
    lines: list[int] = []  # of each sample, in the file
    rows: list[array[int]] = []
    texts: dict[int, str] = {}
    for line, sample in _read(file, vocab_size):
        if isinstance(sample, str):
            texts[len(rows)] = sample
            rows.append(array("i"))
        else:
            rows.append(sample)
        lines.append(line)
    if not rows:
        raise ConfigError(f"data set {file} is empty")
    indices = list(texts)
    for first in range(0, len(indices), _ENCODE_BATCH):
        batch = indices[first : first + _ENCODE_BATCH]
        for index, tokens in zip(batch, tokenizer.encode_batch([texts[i] for i in batch]), strict=True):
            if not tokens:
                raise ConfigError(f"{file}:{lines[index]}: the tokenizer makes no token of the prompt {texts[index]!r}")
            if max(tokens) >= vocab_size:
                raise ConfigError(f"{file}:{lines[index]}: the tokenizer makes token {max(tokens)}, the model knows {vocab_size} tokens")
            rows[index] = array("i", tokens)
    dataset = _pack(file.name, rows, texts)
    if max_seq_len is not None:
        lengths = dataset.lengths()
        over = np.flatnonzero(lengths + max_output_len > max_seq_len)
        if len(over):
            worst = int(over[np.argmax(lengths[over])])
            more = f" ({len(over)} of {len(rows)} samples are too long, this one the most)" if len(over) > 1 else ""
            raise ConfigError(
                f"{file}:{lines[worst]}: the prompt has {lengths[worst]} tokens, and with max_output_len {max_output_len} "
                f"it does not fit max_seq_len {max_seq_len}{more}"
            )
    return dataset


def _pack(name: str, rows: list[array[int]], texts: Mapping[int, str]) -> Dataset:
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return Dataset(name, np.concatenate([np.frombuffer(row, np.int32) for row in rows]), offsets, texts=texts)


def _read(file: Path, vocab_size: int) -> Iterator[tuple[int, str | array[int]]]:
    """The line number and the prompt, as text or as checked tokens, of every line that is not blank."""
    try:
        with file.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                raw = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if raw.strip():
                    try:
                        yield number, _parse(raw, vocab_size)
                    except ValueError as error:
                        raise ConfigError(f"{file}:{number}: {error}") from error
    except FileNotFoundError as error:
        siblings = [sibling.name for sibling in file.parent.glob("*")]
        raise ConfigError(f"data set {file} does not exist{nearest(file.name, siblings)}") from error
    except IsADirectoryError as error:
        raise ConfigError(f"data set {file} is a directory, not a JSONL file") from error
    except OSError as error:
        raise ConfigError(f"data set {file} cannot be read: {error}") from error


def _parse(line: bytes, vocab_size: int) -> str | array[int]:
    """A line's prompt; ValueError says what is wrong with it."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8") from error
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as error:
        cut = "" if line.endswith(b"\n") else "; the file ends here: is it truncated?"
        raise ValueError(f"not valid JSON: {error}{cut}") from error
    if not isinstance(entry, dict):
        raise ValueError(f'a JSON {_json_type(entry)}, not an object with "prompt" or "input_tokens"')
    present = [key for key in _KEYS if key in entry]
    if len(present) != 1:
        found = ", ".join(f"{key}{nearest(key, _KEYS)}" for key in entry) or "no key"
        raise ValueError('both "prompt" and "input_tokens"' if present else f'neither "prompt" nor "input_tokens", but {found}')
    value = entry[present[0]]
    return _check_prompt(value) if present[0] == "prompt" else _check_tokens(value, vocab_size)


def _check_prompt(prompt: Any) -> str:
    if not isinstance(prompt, str):
        raise ValueError(f"prompt is a JSON {_json_type(prompt)}, not a string")
    if not prompt.strip():
        raise ValueError("prompt is empty")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"prompt has half a surrogate pair at character {error.start + 1}") from error
    return prompt


def _check_tokens(tokens: Any, vocab_size: int) -> array[int]:
    if not isinstance(tokens, list):
        raise ValueError(f"input_tokens is a JSON {_json_type(tokens)}, not an array")
    if not tokens:
        raise ValueError("input_tokens is empty")
    if set(map(type, tokens)) != {int}:
        wrong = next(token for token in tokens if type(token) is not int)
        raise ValueError(f"input_tokens has {json.dumps(wrong)}, which is not an integer")
    for token in (min(tokens), max(tokens)):
        if not 0 <= token < vocab_size:
            raise ValueError(f"input_tokens has {token}; token ids are 0 to {vocab_size - 1}")
    return array("i", tokens)


def _json_type(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}
    return names[type(value)]


def _synthetic(spec: Synthetic, tokenizer: Tokenizer, vocab_size: int, max_seq_len: int | None) -> Dataset:
    for name, low in {
        "input_mean": 1.0,
        "output_mean": 1.0,
        "input_stdev": 0.0,
        "output_stdev": 0.0,
        "num_samples": 1.0,
        "seed": 0.0,
    }.items():
        value = getattr(spec, name)
        if not (math.isfinite(value) and value >= low):
            raise ConfigError(f"--{name} {value}: at least {low:.0f}")
    random = np.random.default_rng(spec.seed)

    def lengths(mean: float, stdev: float) -> NDArray[np.int64]:
        return np.maximum(np.rint(random.normal(mean, stdev, spec.num_samples)), 1).astype(np.int64)

    inputs, outputs = lengths(spec.input_mean, spec.input_stdev), lengths(spec.output_mean, spec.output_stdev)
    worst = int(np.argmax(inputs + outputs))
    if max_seq_len is not None and inputs[worst] + outputs[worst] > max_seq_len:
        raise ConfigError(
            f"--dataset synthetic: sample {worst} has {inputs[worst]} input and {outputs[worst]} output tokens, "
            f"which does not fit max_seq_len {max_seq_len}; lower --input_mean, --output_mean or their --…_stdev"
        )
    plain = range(vocab_size)[tokenizer.plain_tokens.start : tokenizer.plain_tokens.stop]
    if not plain:
        raise ConfigError(f"--dataset synthetic: none of the model's {vocab_size} tokens is free for random prompts")
    offsets = np.zeros(spec.num_samples + 1, np.int64)
    np.cumsum(inputs, out=offsets[1:])
    tokens = random.integers(plain.start, plain.stop, int(offsets[-1]), np.int32)
    return Dataset("synthetic", tokens, offsets, outputs)
