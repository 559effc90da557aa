"""The data set of a file's conversations: each request's prompt, with the recorded responses before it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from disagg.errors import ConfigError
from mpillm.data.conversations import Conversation, Turn, read_conversations
from mpillm.data.dataset import Dataset, PromptLimits, Turns, check_lengths, check_traces, tokens_of
from mpillm.data.records import KNOWN, Columns
from mpillm.data.row_files import read_rows
from mpillm.data.tokenizer import Tokenizer


def load_conversations(
    file: Path,
    tokenizer: Tokenizer,
    limits: PromptLimits,
    columns: Columns = KNOWN,
    are_generated: bool | None = None,
) -> Dataset:
    """Read conversations, and compute the prompt of each request.

    `are_generated`: see `Turns`; None: if the file has not all responses. Raises ConfigError with the file
    and the line of a wrong row, and of a request that exceeds a limit.
    """
    vocab_size = tokenizer.vocab_size if limits.vocab_size is None else limits.vocab_size
    rows = ((f"{file}:{line}", row) for line, row in read_rows(file))
    conversations = read_conversations(rows, vocab_size, columns)
    if not conversations:
        raise ConfigError(f"data set {file} is empty")
    turns = [turn for conversation in conversations for turn in conversation.turns]
    as_read = [turn.prompt if turn.prompt is not None else "" for turn in turns]
    check_traces(file, as_read, limits, lambda sample: turns[sample].where)
    if are_generated is None:
        are_generated = not all(conversation.has_responses for conversation in conversations)
    stored: list[array[int]] = []
    starts, n_tokens, size = list[int](), list[int](), 0
    for conversation in conversations:
        prompts = _prompts(conversation, tokenizer, vocab_size, are_generated)
        offsets = [0] * len(prompts)
        last: array[int] = array("i")
        # Usually a prompt is the beginning of the next one. Then only the last one is stored.
        for i in reversed(range(len(prompts))):
            if last[: len(prompts[i])] != prompts[i]:
                last = prompts[i]
                stored.append(last)
                size += len(last)
            offsets[i] = size - len(last)
        starts += offsets
        n_tokens += map(len, prompts)
    lengths = [turn.output_len for turn in turns]
    check_lengths(np.array(n_tokens), limits, lambda sample: turns[sample].where)
    counts = [0, *(len(conversation.turns) for conversation in conversations)]
    return Dataset(
        file.name,
        np.concatenate([np.frombuffer(one, np.int32) for one in stored]),
        np.array(starts, np.int64),
        np.array(n_tokens, np.int64),
        np.array([limits.max_output_len if n is None else n for n in lengths], np.int64),
        turns=Turns(
            conversations,
            np.cumsum(counts),
            np.array([turn.delay_s for turn in turns]),
            np.array([np.nan if turn.at_s is None else turn.at_s for turn in turns]),
            are_generated,
        ),
    )


def _prompts(
    conversation: Conversation, tokenizer: Tokenizer, vocab_size: int, are_generated: bool
) -> Sequence[array[int]]:
    """Return the tokens of each request. Raises ConfigError with the request's place.

    If responses are generated, later requests are not known yet; the first one is in their place.
    """
    turns = conversation.turns[:1] if are_generated else conversation.turns
    if not are_generated and not conversation.has_responses:
        missing = next(turn for turn in turns if turn.response is None and turn.prompt is None)
        raise ConfigError(
            f"{missing.where}: the file has no response to this request, which the next one needs"
        )
    prompts = list(_encoded(conversation, turns, tokenizer, vocab_size))
    for turn, tokens in zip(turns, prompts, strict=True):
        if not tokens or max(tokens) >= vocab_size:
            problem = f"token {max(tokens)}, the model knows {vocab_size} tokens" if tokens else "no token"
            raise ConfigError(f"{turn.where}: the tokenizer makes {problem} of the prompt")
    return prompts + prompts[:1] * (len(conversation.turns) - len(turns))


def _encoded(
    conversation: Conversation, turns: Sequence[Turn], tokenizer: Tokenizer, vocab_size: int
) -> Iterator[array[int]]:
    responses = conversation.recorded_responses
    chats = [conversation.messages(responses[:i]) for i, turn in enumerate(turns) if turn.prompt is None]
    try:
        encoded = iter(tokenizer.encode_chats(chats, conversation.tools))
        for turn in turns:
            if turn.prompt is None:
                yield array("i", next(encoded))
            else:
                yield tokens_of(turn.prompt, tokenizer, vocab_size)
    except ConfigError as error:
        raise ConfigError(f"{conversation.turns[0].where}: {error}", about=["apply_chat_template"]) from error
