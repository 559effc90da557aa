"""The samples of a test: their prompts as tokens, back to back in one array.

A data set is one of these:

- a file of rows (`row_files`, `records`), such as JSONL with ``{"prompt": "text"}`` or
  ``{"input_tokens": [1, 2, 3]}`` in each line;
- the prompts that come with mpillm;
- synthetic: random tokens with normally distributed lengths;
- a tokenized data set of MLPerf (`preprocessed`).
"""

from __future__ import annotations

import shlex
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError, about
from mpillm.comms.messages import index_of, ragged_take
from mpillm.data.chat_request import TOKENS_AS_CHAT, ChatRequests
from mpillm.data.chat_template import Tools
from mpillm.data.conversations import Conversation
from mpillm.data.data_loader import LLMDataLoader, Samples
from mpillm.data.random_tokens import MAX_LENGTH, draw_lengths, draw_tokens, token_source
from mpillm.data.records import KNOWN, Columns, Prompt, Sample, Trace, sample_of
from mpillm.data.row_fields import FieldUse, own_note, sampling_columns, with_fields
from mpillm.data.row_files import read_rows
from mpillm.data.tokenizer import NoTokenizer, Tokenizer
from mpillm.data.traces import trace_tokens
from mpillm.options.synthetic_conversations import Normal

BUILTIN_PROMPTS = Path(__file__).parent / "prompts.jsonl"

_MAX_TRACE_TOKENS = 1 << 31  # in all prompts of a trace
_ENCODE_BATCH = 4096  # prompts tokenized in one call, which bounds the memory of the results


@dataclass(frozen=True, slots=True)
class Turns:
    """The samples of a data set as the requests of conversations, one conversation after another."""

    conversations: Sequence[Conversation]
    first: NDArray[np.int64]  # sample of each conversation's first request; shape [conversations + 1]
    delay_s: NDArray[np.float64]  # from the previous response to the request; shape [samples]
    at_s: NDArray[np.float64]  # time stamp of the request; NaN: it has none; shape [samples]
    # Whether prompts have the responses generated in the test, in place of recorded ones. Then the data set
    # has only the prompts of first turns.
    are_generated: bool = False

    def __len__(self) -> int:
        """Return the number of root conversations."""
        return len(self.roots)

    @property
    def roots(self) -> NDArray[np.int64]:
        """The numbers of the root conversations, which are not branches. Their branches follow each."""
        return np.flatnonzero([one.parent is None for one in self.conversations])

    @property
    def has_branches(self) -> bool:
        return len(self.conversations) > len(self)

    def with_gaps(self, longest_s: float) -> Turns:
        """Return the turns with limited delays, and limited gaps between a conversation's time stamps."""
        stamped = np.flatnonzero(~np.isnan(self.at_s))
        owner = np.searchsorted(self.first, stamped, side="right")
        excess = np.maximum(np.diff(self.at_s[stamped]) - longest_s, 0.0) * (np.diff(owner) == 0)
        total = np.concatenate([[0.0], excess.cumsum()])[: len(stamped)]
        at_s = self.at_s.copy()
        at_s[stamped] -= total - total[np.searchsorted(owner, owner)]
        return replace(self, delay_s=np.minimum(self.delay_s, longest_s), at_s=at_s)


@dataclass(frozen=True, slots=True)
class Dataset:
    """A data set; sample i's prompt is ``tokens[starts[i] : starts[i] + n_tokens[i]]``."""

    name: str  # the file's name, or `synthetic`
    tokens: NDArray[np.int32]  # prompts that begin alike may share them
    starts: NDArray[np.int64]  # shape [samples]
    n_tokens: NDArray[np.int64]  # shape [samples]
    output_lengths: NDArray[np.int64] | None = None  # tokens to generate, by sample; None: not in the data
    exact_lengths: bool = False  # no end token ends a response before its output length
    texts: Mapping[int, str] = field(default_factory=dict)  # text prompts by sample
    ignores_stop: NDArray[np.bool_] | None = None  # True: the sample has no stop word; None: not in the data
    # Sampling options of samples by column of their requests, shape [samples]; NaN: the run's option
    sampling: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    sends_text: bool = False  # the tokens are bytes of text, which servers tokenize
    note: str = ""  # for the user: omitted prompts, or the path of the converted file

    turns: Turns | None = None  # of conversations; None: the samples do not follow each other

    @classmethod
    def packed(
        cls, name: str, tokens: NDArray[np.int32], n_tokens: NDArray[np.int64], **fields: Any
    ) -> Dataset:
        """Return a data set whose prompts are back to back in `tokens`. `fields`: as of the class."""
        return cls(name, tokens, n_tokens.cumsum() - n_tokens, n_tokens, **fields)

    def __len__(self) -> int:
        return len(self.starts)

    def sample(self, index: int) -> NDArray[np.int32]:
        """Return the prompt of one sample, as a view."""
        start = self.starts[index]
        return self.tokens[start : start + self.n_tokens[index]]

    def gather(self, indices: NDArray[np.integer[Any]]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return the lengths and the concatenated tokens of samples, in the order of `indices`."""
        at = index_of(indices)
        lengths = self.n_tokens[at]
        return lengths, ragged_take(self.tokens, self.starts[at], lengths)


class PromptTooLong(ConfigError):
    """A prompt exceeds a limit of the model or of the run."""


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Random prompts: normally distributed lengths, and tokens uniform over `Tokenizer.plain_tokens`.

    The fields are the options of the same names. `text_file` is `synthetic_text`: the prompts, one after
    another, are then its text from a random place on.
    """

    input_mean: float
    output_mean: float
    input_stdev: float = 0.0
    output_stdev: float = 0.0
    num_samples: int = 1024
    seed: int = 0
    text_file: Path | None = None


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """Limits of a model and a run on the prompts of a data set."""

    vocab_size: int | None = None  # None: the tokenizer's vocabulary
    max_seq_len: int | None = None  # tokens of prompt plus answer
    max_output_len: int = 1
    max_prompt_len: int | None = None  # tokens of one step, if a prompt must fit one step
    end_ids: tuple[int, ...] = ()
    stop_words: tuple[tuple[int, ...], ...] = ()
    any_stop_words: bool = True  # False: ignore the data set's stop words
    own_fields: FieldUse = FieldUse.UNUSED  # with ALL, prompts are bytes: see `row_fields`


@about("dataset_path", "dataset")
def load_dataset(
    source: Path | Synthetic | LLMDataLoader | None,
    tokenizer: Tokenizer,
    limits: PromptLimits = PromptLimits(),
    columns: Columns = KNOWN,
) -> Dataset:
    """Read a data set, or create a synthetic one. `source`: None: the prompts that come with mpillm.

    Raises ConfigError, with the file and the line or sample, also for a prompt that exceeds the limits. For a
    synthetic sample, the limits include the sample's own output length.
    """
    vocab_size = tokenizer.vocab_size if limits.vocab_size is None else limits.vocab_size
    if isinstance(source, Synthetic):
        try:
            return _synthetic(source, tokenizer, vocab_size, limits.max_seq_len)
        except ConfigError:
            raise
        except (MemoryError, OverflowError, ValueError) as error:  # ValueError: too large for an array
            raise ConfigError(
                f"--dataset synthetic: {source.num_samples} samples (--num_samples) do not fit the memory",
                about=["num_samples"],
            ) from error
    if isinstance(source, LLMDataLoader):
        return _preprocessed(source.load(), vocab_size, limits)
    file = BUILTIN_PROMPTS if source is None else source
    dataset, lines = _of_rows(file, tokenizer, vocab_size, columns, limits)
    if source is None:
        dataset = _fitting(dataset, limits)
    check_lengths(dataset.n_tokens, limits, lambda sample: f"{file}:{lines[sample]}")
    return dataset


def _of_rows(
    file: Path, tokenizer: Tokenizer, vocab_size: int, columns: Columns, limits: PromptLimits
) -> tuple[Dataset, list[int]]:
    """Return the data set in a file, and the line of each sample."""
    lines, samples = _samples(file, vocab_size, columns, limits.own_fields)
    where = [f"{file}:{line}" for line in lines]
    texts = {i: sample.prompt for i, sample in enumerate(samples) if isinstance(sample.prompt, str)}
    rows: dict[int, array[int]] = {}
    for first in range(0, len(texts), _ENCODE_BATCH):
        batch = list(texts)[first : first + _ENCODE_BATCH]
        rows |= zip(batch, map(_as_array, tokenizer.encode_batch([texts[i] for i in batch])), strict=True)
    check_traces(file, [sample.prompt for sample in samples], limits, where.__getitem__)
    for i, sample in enumerate(samples):
        if i not in rows:
            try:
                rows[i] = tokens_of(sample.prompt, tokenizer, vocab_size, sample.tools, i)
            except ConfigError as error:
                raise ConfigError(f"{where[i]}: {error}", about=["apply_chat_template"]) from error
    for i, tokens in rows.items():
        if not tokens:
            raise ConfigError(f"{where[i]}: the tokenizer makes no token of the prompt {texts.get(i, '')!r}")
        if max(tokens) >= vocab_size:
            raise ConfigError(
                f"{where[i]}: the tokenizer makes token {max(tokens)}, the model knows {vocab_size} tokens"
            )
    lengths = None
    if any(sample.output_len is not None for sample in samples):
        lengths = np.array([sample.output_len or MAX_LENGTH for sample in samples], np.int64)
    prompts = [with_fields(rows[i], sample.own.body) for i, sample in enumerate(samples)]
    packed = _pack(file.name, prompts, texts)
    sampling, note = sampling_columns([sample.own for sample in samples]), _note(samples, lengths, limits)
    return replace(packed, output_lengths=lengths, sampling=sampling, note=note), lines


def tokens_of(
    prompt: Prompt, tokenizer: Tokenizer, vocab_size: int, tools: Tools = None, sample: int = 0
) -> array[int]:
    """Return the tokens of a row's prompt. Raises ConfigError as the tokenizer's methods.

    `tools`: that the model may call, if the prompt is a chat. `sample`: see `trace_tokens`.
    """
    if isinstance(tokenizer, ChatRequests) and not isinstance(prompt, (str, list)):
        raise ConfigError(TOKENS_AS_CHAT)
    if isinstance(prompt, Trace):
        return _as_array(trace_tokens(prompt, tokenizer, vocab_size, sample).tolist())
    if isinstance(prompt, list):
        return _as_array(tokenizer.encode_chats([prompt], tools)[0])
    return _as_array(tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt


def _as_array(tokens: Sequence[int]) -> array[int]:
    return array("i", tokens)


def _samples(file: Path, vocab_size: int, columns: Columns, use: FieldUse) -> tuple[list[int], list[Sample]]:
    lines, samples = [], []
    for line, row in read_rows(file):
        try:
            samples.append(sample_of(row, vocab_size, columns, use))
        except ValueError as error:
            message = str(error).replace("< FILE ", f"< {shlex.quote(str(file))} ")
            raise ConfigError(f"{file}:{line}: {message}") from error
        lines.append(line)
    if not samples:
        raise ConfigError(f"data set {file} is empty")
    return lines, samples


def _note(samples: Sequence[Sample], lengths: NDArray[np.int64] | None, limits: PromptLimits) -> str:
    """Return a note for the user about parts of the rows that have no effect."""
    notes = [cut_note(lengths, limits), own_note(sample.own for sample in samples)]
    notes.append(unused_note(sample.unused for sample in samples))
    if any(isinstance(sample.prompt, Trace) for sample in samples):
        notes.append("its prompts are random tokens, with the trace's lengths, and equal for equal hash_ids")
    return "; ".join(filter(None, notes))


def cut_note(lengths: NDArray[np.int64] | None, limits: PromptLimits) -> str:
    """Return that --max_output_len cuts answers, whose `lengths` are in the data; "" if it cuts none."""
    lengths = np.zeros(0, np.int64) if lengths is None else lengths
    over = lengths[(lengths > limits.max_output_len) & (lengths < MAX_LENGTH)]
    if not len(over):
        return ""
    return (
        f"{len(over)} of its {len(lengths)} samples exceed --max_output_len {limits.max_output_len}"
        f" with at most {over.max()} tokens: their answers are cut"
    )


def unused_note(each: Iterable[frozenset[str]]) -> str:
    """Return which keys of rows have no effect; "" if all have one. `each`: these keys, by row."""
    unused = sorted(frozenset[str]().union(*each))
    return f"its {', '.join(unused)} {'has' if len(unused) == 1 else 'have'} no effect" if unused else ""


def check_traces(
    file: Path, prompts: Sequence[Prompt], limits: PromptLimits, where: Callable[[int], str]
) -> None:
    """Raise ConfigError for a trace with lengths that exceed the model's or the memory's limits.

    Call it before the prompts are made. `where(sample)`: its place.
    """
    indices = [i for i, prompt in enumerate(prompts) if isinstance(prompt, Trace)]
    lengths = np.array([prompt.length for prompt in prompts if isinstance(prompt, Trace)], np.int64)
    if lengths.sum() > _MAX_TRACE_TOKENS:
        raise ConfigError(f"{file}: its prompts have {lengths.sum()} tokens; at most {_MAX_TRACE_TOKENS} fit")
    check_lengths(lengths, limits, lambda sample: where(indices[sample]))


def unused_lengths(dataset: Dataset) -> str:
    """Return a warning for a benchmark command that has its own option for output lengths."""
    return f"the lengths of answers in {dataset.name} have no effect: --output_len decides"


def check_lengths(lengths: NDArray[np.int64], limits: PromptLimits, where: Callable[[int], str]) -> None:
    """Raise PromptTooLong if the longest prompt exceeds a limit. `where(sample)`: the sample's place."""
    for max_length, name, options in _allowed(limits):
        over = np.flatnonzero(lengths > max_length)
        if len(over):
            worst = int(over[np.argmax(lengths[over])])
            more = ""
            if len(over) > 1:
                more = f" ({len(over)} of {len(lengths)} samples are too long; this is the longest)"
            raise PromptTooLong(
                f"{where(worst)}: the prompt has {lengths[worst]} tokens and does not fit {name}{more}",
                about=options,
            )


def _allowed(limits: PromptLimits) -> Iterator[tuple[int, str, Sequence[str]]]:
    """Yield for each limit the maximum prompt length, its name and its options."""
    if limits.max_seq_len is not None:
        name = f"max_seq_len {limits.max_seq_len} with max_output_len {limits.max_output_len}"
        yield limits.max_seq_len - limits.max_output_len, name, ("max_seq_len", "max_output_len")
    if limits.max_prompt_len is not None:
        name = f"--max_num_tokens {limits.max_prompt_len} without `--enable_chunked_context true`"
        yield limits.max_prompt_len, name, ("max_num_tokens", "enable_chunked_context")


def _fitting(dataset: Dataset, limits: PromptLimits) -> Dataset:
    """Remove the samples that exceed the limits. If all exceed them, return all; the caller rejects them."""
    lengths, allowed = dataset.n_tokens, list(_allowed(limits))
    max_length = min((max_length for max_length, *_ in allowed), default=lengths.max())
    indices = np.flatnonzero(lengths <= max_length)
    if len(indices) in (0, len(lengths)):
        return dataset
    names = ", or ".join(name for max_length, name, _ in allowed if lengths.max() > max_length)
    note = (
        f"{len(lengths) - len(indices)} of its {len(lengths)} prompts are left out: they do not fit {names}"
    )
    new_lengths, tokens = dataset.gather(indices)
    texts = {new: dataset.texts[int(old)] for new, old in enumerate(indices)}
    return Dataset.packed(dataset.name, tokens, new_lengths, texts=texts, note=note)


def _preprocessed(samples: Samples, vocab_size: int, limits: PromptLimits) -> Dataset:
    """Check the samples against the vocabulary and the limits. Raises ConfigError."""
    file, tokens = samples.file, samples.tokens
    for place in (int(tokens.argmin()), int(tokens.argmax())):
        if not 0 <= tokens[place] < vocab_size:
            sample = int(np.searchsorted(np.cumsum(samples.lengths), place, "right"))
            raise ConfigError(
                f"{file}: sample {sample} has token {tokens[place]}; the model's are 0 to {vocab_size - 1}"
            )
    check_lengths(samples.lengths, limits, lambda sample: f"{file}: sample {sample}")
    ignores_stop = None
    if samples.stop_words is not None and limits.any_stop_words:
        ignores_stop = _ignores_stop(samples.stop_words, limits, file)
    lengths = samples.lengths
    return Dataset.packed(file.name, tokens, lengths, ignores_stop=ignores_stop, note=samples.note)


def _ignores_stop(stop_words: NDArray[np.int32], limits: PromptLimits, file: Path) -> NDArray[np.bool_]:
    """Return True for samples with only the end token. Raises ConfigError for an unknown stop word."""
    distinct, first, which = np.unique(stop_words, axis=0, return_index=True, return_inverse=True)
    ignores = np.zeros(len(distinct), np.bool_)
    for i, row in enumerate(distinct.tolist()):
        word = [token for token in row if token >= 0]
        while word and word[-1] in limits.end_ids:  # end tokens pad shorter words
            word.pop()
        ignores[i] = not word
        if word and tuple(word) not in limits.stop_words:
            known = ", ".join(str(list(known)) for known in limits.stop_words) or "none"
            raise ConfigError(
                f"{file}: sample {first[i]} has stop word {word}; "
                f"the stop words of this run (--stop_words) are: {known}",
                about=["stop_words"],
            )
    return ignores[which.reshape(-1)]


def _pack(name: str, rows: list[array[int]], texts: Mapping[int, str]) -> Dataset:
    lengths = np.array([len(row) for row in rows], np.int64)
    tokens = np.concatenate([np.frombuffer(row, np.int32) for row in rows])
    return Dataset.packed(name, tokens, lengths, texts=texts)


@about("dataset")
def _synthetic(spec: Synthetic, tokenizer: Tokenizer, vocab_size: int, max_seq_len: int | None) -> Dataset:
    random, n = np.random.default_rng(spec.seed), spec.num_samples
    inputs = draw_lengths(random, Normal(spec.input_mean, spec.input_stdev), n)
    outputs = draw_lengths(random, Normal(spec.output_mean, spec.output_stdev), n)
    worst = int(np.argmax(inputs + outputs))
    if max_seq_len is not None and inputs[worst] + outputs[worst] > max_seq_len:
        raise ConfigError(
            f"--dataset synthetic: sample {worst} has {inputs[worst]} input and {outputs[worst]} output "
            f"tokens, which does not fit max_seq_len {max_seq_len}; "
            "lower --input_mean, --output_mean or their --…_stdev",
            about=["input_mean", "output_mean", "max_seq_len"],
        )
    source = token_source(tokenizer, vocab_size, spec.text_file)
    if not len(source):
        raise ConfigError(
            f"--dataset synthetic: none of the model's {vocab_size} tokens is free for random prompts"
        )
    tokens = draw_tokens(random, source, int(inputs.sum()))
    note = ""
    if isinstance(tokenizer, NoTokenizer) and isinstance(source, range):
        note = f"its prompts are random token ids from {source.start} to {source.stop - 1}: no tokenizer here"
    return Dataset.packed("synthetic", tokens, inputs, output_lengths=outputs, note=note)
