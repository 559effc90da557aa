"""The samples of a test: their prompts as tokens, back to back in one array.

A data set is a JSONL file with ``{"prompt": "text"}`` or ``{"input_tokens": [1, 2, 3]}`` on each line, the
prompts that come with the program, synthetic (random tokens with normally distributed lengths), or one of
MLPerf's, tokenized beforehand (`preprocessed`).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError, about, nearest
from mpillm.comms.messages import index_of, ragged_take
from mpillm.data.data_loader import LLMDataLoader, Samples
from mpillm.data.json_array import not_lines
from mpillm.data.tokenizer import Tokenizer
from mpillm.files import excerpt

BUILTIN_PROMPTS = Path(__file__).parent / "prompts.jsonl"

_KEYS = ("prompt", "input_tokens")
_LONGEST = 1 << 40  # tokens of a synthetic prompt or answer: sums of these do not overflow
_MOST_SAID = 300  # characters of a line's keys in a message
_ENCODE_BATCH = 4096  # prompts tokenized in one call: bounds the memory of the results


@dataclass(frozen=True, slots=True)
class Dataset:
    """Sample i's prompt is ``tokens[offsets[i]:offsets[i + 1]]``."""

    name: str  # of the file, or `synthetic`
    tokens: NDArray[np.int32]
    offsets: NDArray[np.int64]  # shape [samples + 1]
    output_lengths: NDArray[np.int64] | None = None  # tokens to generate for each sample, if it says so
    texts: Mapping[int, str] = field(default_factory=dict)  # by sample, the prompts that were given as text
    ignores_stop: NDArray[np.bool_] | None = None  # samples whose answers no stop word ends, if any
    note: str = ""  # for the user: which prompts were left out, or where the converted file is

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def lengths(self) -> NDArray[np.int64]:
        """Return the number of prompt tokens of each sample."""
        return np.diff(self.offsets)

    def sample(self, index: int) -> NDArray[np.int32]:
        """Return the prompt of one sample, as a view."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def gather(self, indices: NDArray[np.integer[Any]]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return lengths and tokens, back to back, of these samples' prompts, in the order of `indices`."""
        at = index_of(indices)
        starts = self.offsets[at]
        lengths = self.offsets[1:][at] - starts
        return lengths, ragged_take(self.tokens, starts, lengths)


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Random prompts of normal, rounded lengths, at least 1; tokens uniform over `Tokenizer.plain_tokens`.

    The options of the same names give the values; their fields check them.
    """

    input_mean: float
    output_mean: float
    input_stdev: float = 0.0
    output_stdev: float = 0.0
    num_samples: int = 1024
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that a model and a run set to a data set."""

    vocab_size: int | None = None  # None: the tokenizer's
    max_seq_len: int | None = None  # tokens of prompt plus answer
    max_output_len: int = 1
    max_prompt_len: int | None = None  # tokens of a step, if a prompt must fit one step
    end_ids: tuple[int, ...] = ()
    stop_words: tuple[tuple[int, ...], ...] = ()
    any_stop_words: bool = True  # False: ignore those of the data set


@about("dataset_path", "dataset")
def load_dataset(
    source: Path | Synthetic | LLMDataLoader | None, tokenizer: Tokenizer, limits: Limits = Limits()
) -> Dataset:
    """Read a JSONL file or a preprocessed data set, make a synthetic one, or (None) take the bundled prompts.

    Raises ConfigError, which names the file and the line or sample, also for a prompt that does not fit the
    limits (a synthetic sample: with its own output length).
    """
    vocab_size = tokenizer.vocab_size if limits.vocab_size is None else limits.vocab_size
    if isinstance(source, Synthetic):
        try:
            return _synthetic(source, tokenizer, vocab_size, limits.max_seq_len)
        except ConfigError:
            raise
        except (MemoryError, OverflowError, ValueError) as error:  # ValueError: more than an array can have
            raise ConfigError(
                f"--dataset synthetic: {source.num_samples} samples (--num_samples) do not fit the memory",
                about=["num_samples"],
            ) from error
    if isinstance(source, LLMDataLoader):
        return _preprocessed(source.load(), vocab_size, limits)
    file = BUILTIN_PROMPTS if source is None else source
    lines: list[int] = []  # the line of each sample
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
                where = f"{file}:{lines[index]}"
                raise ConfigError(f"{where}: the tokenizer makes no token of the prompt {texts[index]!r}")
            if max(tokens) >= vocab_size:
                where = f"{file}:{lines[index]}"
                raise ConfigError(
                    f"{where}: the tokenizer makes token {max(tokens)}, the model knows {vocab_size} tokens"
                )
            rows[index] = array("i", tokens)
    dataset = _pack(file.name, rows, texts)
    if source is None:
        dataset = _fitting(dataset, limits)
    _check_lengths(dataset.lengths(), limits, lambda sample: f"{file}:{lines[sample]}")
    return dataset


def _check_lengths(lengths: NDArray[np.int64], limits: Limits, where: Callable[[int], str]) -> None:
    """Raise ConfigError for the longest prompt that does not fit; `where(sample)` names it."""
    for longest, name, options in _allowed(limits):
        over = np.flatnonzero(lengths > longest)
        if len(over):
            worst = int(over[np.argmax(lengths[over])])
            more = ""
            if len(over) > 1:
                more = f" ({len(over)} of {len(lengths)} samples are too long; this is the longest)"
            raise ConfigError(
                f"{where(worst)}: the prompt has {lengths[worst]} tokens and does not fit {name}{more}",
                about=options,
            )


def _allowed(limits: Limits) -> Iterator[tuple[int, str, Sequence[str]]]:
    """Yield the longest prompt that each limit allows, the limit's name, and its options."""
    if limits.max_seq_len is not None:
        name = f"max_seq_len {limits.max_seq_len} with max_output_len {limits.max_output_len}"
        yield limits.max_seq_len - limits.max_output_len, name, ("max_seq_len", "max_output_len")
    if limits.max_prompt_len is not None:
        name = f"--max_num_tokens {limits.max_prompt_len} without `--enable_chunked_context true`"
        yield limits.max_prompt_len, name, ("max_num_tokens", "enable_chunked_context")


def _fitting(dataset: Dataset, limits: Limits) -> Dataset:
    """Keep the samples that fit; if none does, keep all, for the caller to refuse."""
    lengths, allowed = dataset.lengths(), list(_allowed(limits))
    kept = np.flatnonzero(lengths <= min((longest for longest, *_ in allowed), default=lengths.max()))
    if len(kept) in (0, len(lengths)):
        return dataset
    names = ", or ".join(name for longest, name, _ in allowed if lengths.max() > longest)
    note = f"{len(lengths) - len(kept)} of its {len(lengths)} prompts are left out: they do not fit {names}"
    kept_lengths, tokens = dataset.gather(kept)
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(kept_lengths)))
    return Dataset(
        dataset.name,
        tokens,
        offsets,
        texts={new: dataset.texts[int(old)] for new, old in enumerate(kept)},
        note=note,
    )


def _preprocessed(samples: Samples, vocab_size: int, limits: Limits) -> Dataset:
    """Raise ConfigError, with the file and the sample, if one does not fit the model or the run."""
    file, tokens = samples.file, samples.tokens
    offsets = np.zeros(len(samples.lengths) + 1, np.int64)
    np.cumsum(samples.lengths, out=offsets[1:])
    for place in (int(tokens.argmin()), int(tokens.argmax())):
        if not 0 <= tokens[place] < vocab_size:
            sample = int(np.searchsorted(offsets, place, "right")) - 1
            raise ConfigError(
                f"{file}: sample {sample} has token {tokens[place]}; the model's are 0 to {vocab_size - 1}"
            )
    _check_lengths(samples.lengths, limits, lambda sample: f"{file}: sample {sample}")
    ignores_stop = None
    if samples.stop_words is not None and limits.any_stop_words:
        ignores_stop = _ignores_stop(samples.stop_words, limits, file)
    return Dataset(file.name, tokens, offsets, ignores_stop=ignores_stop, note=samples.note)


def _ignores_stop(words: NDArray[np.int32], limits: Limits, file: Path) -> NDArray[np.bool_]:
    """Return which samples have only the end token; ConfigError for a stop word that is not the run's."""
    distinct, first, which = np.unique(words, axis=0, return_index=True, return_inverse=True)
    ignores = np.zeros(len(distinct), np.bool_)
    for i, row in enumerate(distinct.tolist()):
        word = [token for token in row if token >= 0]
        while word and word[-1] in limits.end_ids:  # the padding of shorter words
            word.pop()
        ignores[i] = not word
        if word and tuple(word) not in limits.stop_words:
            known = ", ".join(str(list(known)) for known in limits.stop_words) or "none"
            raise ConfigError(
                f"{file}: sample {first[i]} has stop word {word}; "
                f"those of this run (--stop_words) are: {known}",
                about=["stop_words"],
            )
    return ignores[which.reshape(-1)]


def _pack(name: str, rows: list[array[int]], texts: Mapping[int, str]) -> Dataset:
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return Dataset(name, np.concatenate([np.frombuffer(row, np.int32) for row in rows]), offsets, texts=texts)


def _read(file: Path, vocab_size: int) -> Iterator[tuple[int, str | array[int]]]:
    """Yield line number and prompt (text, or checked tokens) of every line that is not blank."""
    try:
        with file.open("rb") as stream:
            start = stream.peek(1)
            if start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
                raise ConfigError(not_lines(file, b'"conversations"' in start))
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
    """Return a line's prompt; ValueError says what is wrong with it."""
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
        neither = f'neither "prompt" nor "input_tokens", but {found[:_MOST_SAID]}'
        raise ValueError('both "prompt" and "input_tokens"' if present else neither)
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
        raise ValueError(f"input_tokens has {excerpt(wrong)}, which is not an integer")
    for token in (min(tokens), max(tokens)):
        if not 0 <= token < vocab_size:
            raise ValueError(f"input_tokens has {token}; token ids are 0 to {vocab_size - 1}")
    return array("i", tokens)


def _json_type(value: Any) -> str:
    names = {
        dict: "object",
        list: "array",
        str: "string",
        int: "number",
        float: "number",
        bool: "boolean",
        type(None): "null",
    }
    return names[type(value)]


@about("dataset")
def _synthetic(spec: Synthetic, tokenizer: Tokenizer, vocab_size: int, max_seq_len: int | None) -> Dataset:
    random = np.random.default_rng(spec.seed)

    def lengths(mean: float, stdev: float) -> NDArray[np.int64]:
        return np.clip(np.rint(random.normal(mean, stdev, spec.num_samples)), 1, _LONGEST).astype(np.int64)

    inputs, outputs = lengths(spec.input_mean, spec.input_stdev), lengths(spec.output_mean, spec.output_stdev)
    worst = int(np.argmax(inputs + outputs))
    if max_seq_len is not None and inputs[worst] + outputs[worst] > max_seq_len:
        raise ConfigError(
            f"--dataset synthetic: sample {worst} has {inputs[worst]} input and {outputs[worst]} output "
            f"tokens, which does not fit max_seq_len {max_seq_len}; "
            "lower --input_mean, --output_mean or their --…_stdev",
            about=["input_mean", "output_mean", "max_seq_len"],
        )
    plain = range(vocab_size)[tokenizer.plain_tokens.start : tokenizer.plain_tokens.stop]
    if not plain:
        raise ConfigError(
            f"--dataset synthetic: none of the model's {vocab_size} tokens is free for random prompts"
        )
    offsets = np.zeros(spec.num_samples + 1, np.int64)
    np.cumsum(inputs, out=offsets[1:])
    tokens = random.integers(plain.start, plain.stop, int(offsets[-1]), np.int32)
    return Dataset("synthetic", tokens, offsets, outputs)
