"""The data set of conversations: the prompt of each request, with the recorded responses before it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError
from mpillm.data.chat_request import ChatRequests
from mpillm.data.conversation_rows import read_conversations
from mpillm.data.conversations import Conversation, Message, Turn, token_parts
from mpillm.data.dataset import (
    Dataset,
    PromptLimits,
    Turns,
    check_lengths,
    check_traces,
    cut_note,
    tokens_of,
    unused_note,
)
from mpillm.data.records import KNOWN, Columns, Trace
from mpillm.data.row_fields import own_note, sampling_columns, with_fields
from mpillm.data.row_files import read_rows
from mpillm.data.synthetic_conversations import SyntheticConversations, generate
from mpillm.data.tokenizer import Tokenizer
from mpillm.data.trace_rows import renamed_rows
from mpillm.data.traces import trace_text, trace_tokens

_ORDER = 5  # random stream of a seed: the order of conversations


@dataclass(frozen=True, slots=True)
class ConversationChoice:
    """Which rows of a file are conversations of the test, and in which order."""

    trace_columns: Mapping[str, str] | None = None  # see `renamed_rows`
    max_input_len: int | None = None  # tokens; conversations with a longer prompt are left out
    order_seed: int | None = None  # None: the order of the file


def load_conversations(
    file: Path,
    tokenizer: Tokenizer,
    limits: PromptLimits,
    columns: Columns = KNOWN,
    are_generated: bool | None = None,
    choice: ConversationChoice | None = None,
    writer: Tokenizer | None = None,
) -> Dataset:
    """Read conversations, and compute the prompt of each request.

    `are_generated`: see `Turns`; None: if the file has not all responses. `writer`: for a chat endpoint,
    makes texts of the tokens of traces. Raises ConfigError with the file and the line of a wrong row, and of
    a request that exceeds a limit.
    """
    choice = ConversationChoice() if choice is None else choice
    vocab_size = tokenizer.vocab_size if limits.vocab_size is None else limits.vocab_size
    rows: Iterable[tuple[str, Any]]
    rows = ((f"{file}:{line}", row) for line, row in read_rows(file, may_be_array=True))
    left_out: list[str] = []
    failed: list[str] = []
    if choice.trace_columns:
        rows = renamed_rows(rows, choice.trace_columns, failed)
    conversations = read_conversations(rows, vocab_size, columns, left_out, limits.own_fields, failed)
    if not conversations:
        raise ConfigError(f"data set {file} is empty")
    if choice.order_seed is not None:
        order = np.random.default_rng([choice.order_seed, _ORDER]).permutation(len(conversations))
        conversations = [conversations[i] for i in order]
    n_read = len(conversations)
    if choice.max_input_len is not None:  # a trace may have a length for which there is no memory
        conversations = [one for one in conversations if _longest_trace(one) <= choice.max_input_len]
    turns = [turn for root in conversations for one in root.tree() for turn in one.turns]
    check_traces(file, [_trace_of(turn) or "" for turn in turns], limits, lambda sample: turns[sample].where)
    for number, turn in enumerate(turns):
        if (trace := _trace_of(turn)) is None:
            continue
        if writer is not None:
            _write_trace(turn, trace, writer, number)
            continue
        tokens = trace_tokens(trace, tokenizer, vocab_size, number)
        if turn.trace is not None:
            turn.tokens = tokens
        else:
            turn.prompt = array("i", tokens.tobytes())
    _check_kinds([one for root in conversations for one in root.tree()])
    dataset = _dataset(file.name, conversations, tokenizer, limits, are_generated, choice.max_input_len)
    assert dataset.turns is not None
    notes = [
        cut_note(dataset.output_lengths, limits),
        own_note(turn.own for turn in turns),
        unused_note(turn.unused for turn in turns),
    ]
    notes += [
        f"{reason}, which are left out: {n}"
        for reason, n in (
            ("conversations without a user's message", len(left_out)),
            ("rows without output tokens", len(failed)),
            (
                f"conversations with a prompt of more than {choice.max_input_len} tokens",
                n_read - len(dataset.turns),
            ),
        )
        if n
    ]
    return replace(dataset, note="; ".join(filter(None, notes)))


def _longest_trace(conversation: Conversation) -> int:
    turns = (turn for one in conversation.tree() for turn in one.turns)
    return max(0 if trace is None else trace.length for trace in map(_trace_of, turns))


def _trace_of(turn: Turn) -> Trace | None:
    """Return the trace of what a request adds, or of its complete prompt; None: it has a text or messages."""
    return turn.prompt if isinstance(turn.prompt, Trace) else turn.trace


def _write_trace(turn: Turn, trace: Trace, writer: Tokenizer, number: int) -> None:
    """Make the message of a trace's request. Raises ConfigError with its place if there is no tokenizer."""
    try:
        text = trace_text(trace, writer, number)
    except ConfigError as error:
        raise ConfigError(f"{turn.where}: {error}", about=["model_path"]) from error
    messages: list[Message] = [{"role": "user", "content": text}]
    if turn.trace is not None:
        turn.added = messages
    else:
        turn.prompt = messages


def _check_kinds(conversations: Sequence[Conversation]) -> None:
    """Raise ConfigError if later prompts of one conversation have tokens, and those of another one texts."""
    several = [one for one in conversations if one.n_inherited + len(one.turns) > 1]
    tokens = any(one.is_tokens for one in several)
    texts = next((one for one in several if not one.is_tokens), None)
    if tokens and texts is not None:
        raise ConfigError(
            f"{texts.turns[0].where}: a conversation of texts, but others have only input_length; use"
            " separate files, or --endpoint_type chat"
        )


def synthetic_conversations(
    spec: SyntheticConversations,
    tokenizer: Tokenizer,
    limits: PromptLimits,
    are_generated: bool | None = None,
    *,
    requests: ChatRequests | None = None,
) -> Dataset:
    """Generate conversations. `are_generated`: as for `load_conversations`.

    `requests`: of an endpoint whose prompts are messages. Raises ConfigError if a request exceeds a limit.
    """
    vocab_size = tokenizer.vocab_size if limits.vocab_size is None else limits.vocab_size
    conversations = generate(
        spec, tokenizer, vocab_size, as_text=requests is not None, with_responses=are_generated is False
    )
    if requests is not None:
        limits = replace(limits, vocab_size=None)
    dataset = _dataset("synthetic", conversations, requests or tokenizer, limits, are_generated)
    note = f"synthetic conversations: {spec.sizes.describe()}; seed {spec.seed}"
    notes = filter(None, [note, cut_note(dataset.output_lengths, limits)])
    return replace(dataset, exact_lengths=True, note="; ".join(notes))


def _dataset(
    name: str,
    conversations: Sequence[Conversation],
    tokenizer: Tokenizer,
    limits: PromptLimits,
    are_generated: bool | None,
    max_input_len: int | None = None,
) -> Dataset:
    """Return the requests of conversations as a data set, without conversations with a longer prompt.

    Parameters as of `load_conversations`.
    """
    vocab_size = tokenizer.vocab_size if limits.vocab_size is None else limits.vocab_size
    if are_generated is None:
        are_generated = not all(one.has_responses for root in conversations for one in root.tree())
    stored, usable = _StoredPrompts(), list[Conversation]()
    for root in conversations:
        tree = list[tuple[Conversation, Any, list[int]]]()
        for one in root.tree():
            if not are_generated:
                _check_responses(one)
            if one.is_tokens:
                tree.append((one, *_growing_tokens(one, are_generated)))
            else:
                prompts = _prompts(one, tokenizer, vocab_size, are_generated)
                tree.append((one, prompts, [*map(len, prompts)]))
        if max_input_len is not None and max(max(n_tokens) for *_, n_tokens in tree) > max_input_len:
            continue
        for one, prompts, n_tokens in tree:
            if one.is_tokens:
                stored.add_growing(prompts, n_tokens)
            else:
                stored.add(prompts)
            usable.append(one)
    if not usable:
        raise ConfigError(
            f"data set {name}: each conversation has a prompt of more than {max_input_len} tokens"
            " (--max_input_len)",
            about=["max_input_len"],
        )
    turns = [turn for conversation in usable for turn in conversation.turns]
    lengths = [turn.output_len for turn in turns]
    check_lengths(np.array(stored.n_tokens), limits, lambda sample: turns[sample].where)
    counts = [0, *(len(conversation.turns) for conversation in usable)]
    return Dataset(
        name,
        np.concatenate(stored.prompts),
        np.array(stored.starts, np.int64),
        np.array(stored.n_tokens, np.int64),
        np.array([limits.max_output_len if n is None else n for n in lengths], np.int64),
        sampling=sampling_columns([turn.own for turn in turns]),
        turns=Turns(
            usable,
            np.cumsum(counts),
            np.array([turn.delay_s for turn in turns]),
            np.array([np.nan if turn.at_s is None else turn.at_s for turn in turns]),
            are_generated,
        ),
    )


class _StoredPrompts:
    """Prompts back to back. One that another prompt of the conversation begins with is stored in that one."""

    def __init__(self) -> None:
        self.prompts: list[NDArray[np.int32]] = []
        self.starts: list[int] = []  # by sample, in `prompts`
        self.n_tokens: list[int] = []
        self._size = 0

    def add(self, prompts: Sequence[array[int]]) -> None:
        """Add the prompts of one conversation."""
        offsets = [0] * len(prompts)
        last: array[int] = array("i")
        # Usually a prompt is the beginning of the next one. Then only the last one is stored.
        for i in reversed(range(len(prompts))):
            if last[: len(prompts[i])] != prompts[i]:
                last = prompts[i]
                self._store(np.frombuffer(last, np.int32))
            offsets[i] = self._size - len(last)
        self.starts += offsets
        self.n_tokens += map(len, prompts)

    def add_growing(self, last: NDArray[np.int32], lengths: Sequence[int]) -> None:
        """Add the prompts of one conversation, whose last one begins with each other one."""
        self.starts += [self._size] * len(lengths)
        self.n_tokens += lengths
        self._store(last)

    def _store(self, prompt: NDArray[np.int32]) -> None:
        self.prompts.append(prompt)
        self._size += len(prompt)


def _growing_tokens(conversation: Conversation, are_generated: bool) -> tuple[NDArray[np.int32], list[int]]:
    """Return the last prompt of a conversation of token ids, and the length of each prompt.

    If responses are generated, the first prompt is in the place of later ones.
    """
    turns = conversation.turns[:1] if are_generated else conversation.turns
    parts = list(token_parts(turns, [turn.response_tokens for turn in turns[:-1]]))
    lengths = np.cumsum([len(part) for part in parts])[::2].tolist()
    return np.concatenate(parts), lengths + lengths[:1] * (len(conversation.turns) - len(turns))


def _check_responses(conversation: Conversation) -> None:
    """Raise ConfigError with the place of a request whose response is not recorded, but needed."""
    if missing := next((turn for turn in conversation.answered_turns if not turn.has_response), None):
        raise ConfigError(
            f"{missing.where}: the file has no response to this request, which the next one needs"
        )


def _prompts(
    conversation: Conversation, tokenizer: Tokenizer, vocab_size: int, are_generated: bool
) -> Sequence[array[int]]:
    """Return the tokens of each request. Raises ConfigError with the request's place.

    If responses are generated, later requests are not known yet; the first one of the history is in their
    place.
    """
    turns = conversation.history[:1] if are_generated else conversation.history
    prompts = list(_encoded(conversation, turns, tokenizer, vocab_size))
    for turn, tokens in zip(turns, prompts, strict=True):
        if not tokens or max(tokens) >= vocab_size:
            problem = f"token {max(tokens)}, the model knows {vocab_size} tokens" if tokens else "no token"
            raise ConfigError(f"{turn.where}: the tokenizer makes {problem} of the prompt")
    n = len(conversation.turns)
    return (prompts + prompts[:1] * (n - len(turns)))[-n:]


def _encoded(
    conversation: Conversation, turns: Sequence[Turn], tokenizer: Tokenizer, vocab_size: int
) -> Iterator[array[int]]:
    responses = conversation.recorded_responses
    chats = [conversation.messages(responses[:i]) for i, turn in enumerate(turns) if turn.prompt is None]
    try:
        # Without chats, the model needs no chat template, and not even a tokenizer.
        encoded = iter(tokenizer.encode_chats(chats, conversation.tools) if chats else ())
        for turn in turns:
            if turn.prompt is None:
                tokens = array("i", next(encoded))
            else:
                tokens = tokens_of(turn.prompt, tokenizer, vocab_size, conversation.tools)
            yield with_fields(tokens, turn.own.body)
    except ConfigError as error:
        raise ConfigError(f"{conversation.turns[0].where}: {error}", about=["apply_chat_template"]) from error
