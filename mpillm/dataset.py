"""The samples of a test: their prompts as tokens, all back to back in one array.

A data set is a JSONL file with ``{"prompt": "text"}`` or ``{"input_tokens": [1, 2, 3]}`` on each line, the prompts that come with the
program, synthetic (random tokens with lengths from a normal distribution), or one of MLPerf's, tokenized beforehand (`preprocessed`).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError, nearest
from mpillm.messages import ragged_take
from mpillm.preprocessed.loader import LLMDataLoader, Samples
from mpillm.tokenizer import Tokenizer

BUILTIN_PROMPTS = Path(__file__).parent / "data" / "prompts.jsonl"

_KEYS = ("prompt", "input_tokens")
_LONGEST = 1 << 40  # a synthetic prompt or answer, tokens: sums of these do not overflow
_ENCODE_BATCH = 4096  # prompts that are tokenized together: bounds the memory of the tokenizer's results


@dataclass(frozen=True, slots=True)
class Dataset:
    """Sample i's prompt is ``tokens[offsets[i]:offsets[i + 1]]``."""

    name: str  # of the file, or `synthetic`
    tokens: NDArray[np.int32]
    offsets: NDArray[np.int64]  # shape [samples + 1]
    output_lengths: NDArray[np.int64] | None = None  # tokens to generate, sample by sample, where the data set says so
    texts: Mapping[int, str] = field(default_factory=dict)  # the prompts that were given as text, by sample
    ignores_stop: NDArray[np.bool_] | None = None  # whose answers no stop word ends, where the data set says so

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
    """Random prompts: lengths are normal, rounded, and at least 1; tokens are uniform over `Tokenizer.plain_tokens`.

    The values are those of the options of these names, which the fields check.
    """

    input_mean: float
    output_mean: float
    input_stdev: float = 0.0
    output_stdev: float = 0.0
    num_samples: int = 1024
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """What a model and a run allow a data set."""

    vocab_size: int | None = None  # None: the tokenizer's
    max_seq_len: int | None = None  # prompt and answer together
    max_output_len: int = 1
    max_prompt_len: int | None = None  # one step's tokens, where a prompt can't be computed in several
    end_ids: tuple[int, ...] = ()
    stop_words: tuple[tuple[int, ...], ...] = ()
    any_stop_words: bool = True  # False: none are wanted, whatever the data set has


def load_dataset(source: Path | Synthetic | LLMDataLoader | None, tokenizer: Tokenizer, limits: Limits = Limits()) -> Dataset:
    """The data set in a JSONL file, a synthetic one, a preprocessed one, or (None) the prompts that come with the program.

    ConfigError names the file and the line (or sample) of whatever is wrong, a prompt that does not fit the limits included (for a
    synthetic sample: with its own output length).
    """
    vocab_size = tokenizer.vocab_size if limits.vocab_size is None else limits.vocab_size
    if isinstance(source, Synthetic):
        try:
            return _synthetic(source, tokenizer, vocab_size, limits.max_seq_len)
        except (MemoryError, OverflowError, ValueError) as error:  # ValueError: more than an array can have
            raise ConfigError(f"--dataset synthetic: {source.num_samples} samples (--num_samples) do not fit the memory") from error
    if isinstance(source, LLMDataLoader):
        return _preprocessed(source.load(), vocab_size, limits)
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
    _check_lengths(dataset.lengths(), limits, lambda sample: f"{file}:{lines[sample]}")
    return dataset


def _check_lengths(lengths: NDArray[np.int64], limits: Limits, where: Callable[[int], str]) -> None:
    """ConfigError naming the longest prompt that does not fit; `where(sample)` says which that is."""
    for longest, name in (
        (
            limits.max_seq_len and limits.max_seq_len - limits.max_output_len,
            f"and with max_output_len {limits.max_output_len} it does not fit max_seq_len {limits.max_seq_len}",
        ),
        (limits.max_prompt_len, f"without --enable_chunked_context true it does not fit --max_num_tokens {limits.max_prompt_len}"),
    ):
        over = np.flatnonzero(lengths > longest) if longest is not None else ()
        if len(over):
            worst = int(over[np.argmax(lengths[over])])
            more = f" ({len(over)} of {len(lengths)} samples are too long, this one the most)" if len(over) > 1 else ""
            raise ConfigError(f"{where(worst)}: the prompt has {lengths[worst]} tokens, {name}{more}")


def _preprocessed(samples: Samples, vocab_size: int, limits: Limits) -> Dataset:
    """ConfigError names the file and the sample that does not fit the model or the run."""
    file, tokens = samples.file, samples.tokens
    offsets = np.zeros(len(samples.lengths) + 1, np.int64)
    np.cumsum(samples.lengths, out=offsets[1:])
    for place in (int(tokens.argmin()), int(tokens.argmax())):
        if not 0 <= tokens[place] < vocab_size:
            sample = int(np.searchsorted(offsets, place, "right")) - 1
            raise ConfigError(f"{file}: sample {sample} has token {tokens[place]}; the model's are 0 to {vocab_size - 1}")
    _check_lengths(samples.lengths, limits, lambda sample: f"{file}: sample {sample}")
    ignores_stop = None
    if samples.stop_words is not None and limits.any_stop_words:
        ignores_stop = _ignores_stop(samples.stop_words, limits, file)
    return Dataset(file.name, tokens, offsets, ignores_stop=ignores_stop)


def _ignores_stop(words: NDArray[np.int32], limits: Limits, file: Path) -> NDArray[np.bool_]:
    """Which samples have no stop word but the end token; ConfigError if one has a word that the run does not know."""
    distinct, first, which = np.unique(words, axis=0, return_index=True, return_inverse=True)
    ignores = np.zeros(len(distinct), np.bool_)
    for i, row in enumerate(distinct.tolist()):
        word = [token for token in row if token >= 0]
        while word and word[-1] in limits.end_ids:  # what shorter words are padded with
            word.pop()
        ignores[i] = not word
        if word and tuple(word) not in limits.stop_words:
            known = ", ".join(str(list(known)) for known in limits.stop_words) or "none"
            raise ConfigError(f"{file}: sample {first[i]} has stop word {word}; those of this run (--stop_words) are: {known}")
    return ignores[which.reshape(-1)]


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
    random = np.random.default_rng(spec.seed)

    def lengths(mean: float, stdev: float) -> NDArray[np.int64]:
        return np.clip(np.rint(random.normal(mean, stdev, spec.num_samples)), 1, _LONGEST).astype(np.int64)

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
