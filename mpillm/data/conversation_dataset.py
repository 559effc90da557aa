"""The data set of conversations: the prompt of each request, with the recorded responses before it."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
_ENCODE_BATCH = 32  # chats


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
        why = "has only rows without output tokens" if failed else "is empty"
        raise ConfigError(f"data set {file} {why}")
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
    stored, usable = _Prompts(), list[Conversation]()
    for root in conversations:
        tree = list[tuple[Conversation, _Prompts]]()
        for one in root.tree():
            if not are_generated:
                _check_responses(one)
            if one.is_tokens:
                tree.append((one, _growing_tokens(one, are_generated)))
            else:
                tree.append((one, _prompts(one, tokenizer, vocab_size, are_generated)))
        if max_input_len is not None and max(max(prompts.n_tokens) for _, prompts in tree) > max_input_len:
            continue
        for one, prompts in tree:
            stored.extend(prompts)
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
        np.concatenate(stored.parts),
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


@dataclass
class _Prompts:
    """Prompts back to back. One that the next prompt begins with is stored in that one."""

    parts: list[NDArray[np.int32]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # by sample, in the concatenated parts
    n_tokens: list[int] = field(default_factory=list)  # by sample
    size: int = 0  # of all parts

    def extend(self, others: _Prompts) -> None:
        """Add other prompts after these."""
        self.starts += [self.size + start for start in others.starts]
        self.parts += others.parts
        self.n_tokens += others.n_tokens
        self.size += others.size


def _shared(prompts: Iterable[array[int]]) -> _Prompts:
    """Return the prompts of one conversation. Only one at a time is in memory without being shared."""
    shared, last = _Prompts(), np.zeros(0, np.int32)
    for prompt in prompts:
        tokens = np.frombuffer(prompt, np.int32)
        if not np.array_equal(tokens[: len(last)], last):
            shared.parts.append(last)
            shared.size += len(last)
        shared.starts.append(shared.size)
        shared.n_tokens.append(len(tokens))
        last = tokens
    shared.parts.append(last)
    shared.size += len(last)
    return shared


def _growing_tokens(conversation: Conversation, are_generated: bool) -> _Prompts:
    """Return the prompts of a conversation of token ids. Its last one begins with each other one.

    If responses are generated, the first prompt is in the place of later ones.
    """
    turns = conversation.turns[:1] if are_generated else conversation.turns
    parts = list(token_parts(turns, [turn.response_tokens for turn in turns[:-1]]))
    lengths = np.cumsum([len(part) for part in parts])[::2].tolist()
    last, n = np.concatenate(parts), len(conversation.turns)
    return _Prompts([last], [0] * n, lengths + lengths[:1] * (n - len(turns)), len(last))


def _check_responses(conversation: Conversation) -> None:
    """Raise ConfigError with the place of a request whose response is not recorded, but needed."""
    if missing := next((turn for turn in conversation.answered_turns if not turn.has_response), None):
        raise ConfigError(
            f"{missing.where}: the file has no response to this request, which the next one needs"
        )


def _prompts(
    conversation: Conversation, tokenizer: Tokenizer, vocab_size: int, are_generated: bool
) -> _Prompts:
    """Return the prompts of a conversation of messages. Raises ConfigError with the request's place.

    If responses are generated, later requests are not known yet; the first one of the history is in their
    place.
    """
    history, n = conversation.history, len(conversation.turns)
    numbers = range(1) if are_generated else range(len(history) - n, len(history))
    prompts = _shared(
        _checked(history[numbers.start :], vocab_size, _encoded(conversation, numbers, tokenizer, vocab_size))
    )
    if are_generated:
        prompts.starts, prompts.n_tokens = prompts.starts * n, prompts.n_tokens * n
    return prompts


def _checked(turns: Sequence[Turn], vocab_size: int, prompts: Iterable[array[int]]) -> Iterator[array[int]]:
    """Yield the prompts. Raises ConfigError with the turn of one that the model does not know."""
    for turn, tokens in zip(turns, prompts, strict=False):
        largest = int(np.frombuffer(tokens, np.int32).max(initial=-1))
        if not 0 <= largest < vocab_size:
            problem = f"token {largest}, the model knows {vocab_size} tokens" if tokens else "no token"
            raise ConfigError(f"{turn.where}: the tokenizer makes {problem} of the prompt")
        yield tokens


def _encoded(
    conversation: Conversation, numbers: Iterable[int], tokenizer: Tokenizer, vocab_size: int
) -> Iterator[array[int]]:
    """Yield the tokens of requests. `numbers`: of their turns in the history."""
    history, responses = conversation.history, conversation.recorded_responses
    chats = (conversation.messages(responses[:i]) for i in numbers if history[i].prompt is None)
    try:
        encoded = _encoded_chats(chats, conversation, tokenizer)
        for turn in (history[i] for i in numbers):
            if turn.prompt is None:
                tokens = next(encoded)
            else:
                tokens = tokens_of(turn.prompt, tokenizer, vocab_size, turn.tools)
            yield with_fields(tokens, turn.own.body)
    except ConfigError as error:
        raise ConfigError(f"{conversation.turns[0].where}: {error}", about=["apply_chat_template"]) from error


def _encoded_chats(
    chats: Iterator[list[Message]], conversation: Conversation, tokenizer: Tokenizer
) -> Iterator[array[int]]:
    """Yield the tokens of chats. A batch of a tokenizer is on all cores, but takes 36 bytes for each token.

    Without chats, the model needs no chat template, and not even a tokenizer.
    """
    if isinstance(tokenizer, ChatRequests):
        for chat in chats:
            yield array("i", tokenizer.tokens_of(chat, conversation.tools).tobytes())
        return
    while batch := list(itertools.islice(chats, _ENCODE_BATCH)):
        for tokens in tokenizer.encode_chats(batch, conversation.tools):
            yield array("i", tokens)
