"""Synthetic conversations with given numbers of turns, lengths and delays. Turns are token ids, or texts.

Tokens are random, or those of a text.

Conversation `i` depends on the seed, the sizes, the tokenizer and `i` alone, so a longer list begins with the
shorter one. Its first request begins with the tokens that all conversations share, then those of its group,
which is ``i % groups``, or drawn if groups differ in size.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError, about
from mpillm.data.conversations import Conversation, Message, Turn
from mpillm.data.random_tokens import TokenSource, draw_lengths, draw_seconds, draw_tokens, token_source
from mpillm.data.tokenizer import NoTokenizer, Tokenizer
from mpillm.options.synthetic_conversations import MAX_TURNS, ConversationSizes

DEFAULT_CONVERSATIONS = 100
# Random streams of a seed; all but the first have one for each number
_SYSTEM, _GROUP, _CONVERSATION, _CHOICE = 1, 2, 3, 4
_MAX_REQUESTS = 1_000_000
_MAX_TOKENS = 1 << 31  # in all conversations


@dataclass(frozen=True, slots=True)
class SyntheticConversations:
    """The conversations to generate. The fields are from the options of the same names."""

    sizes: ConversationSizes
    num_conversations: int = DEFAULT_CONVERSATIONS
    seed: int = 0
    text_file: Path | None = None  # of the prompts' text; None: tokens are random


@about("synthetic_conversations", "num_conversations")
def generate(
    spec: SyntheticConversations,
    tokenizer: Tokenizer,
    vocab_size: int,
    *,
    as_text: bool = False,
    with_responses: bool = False,
) -> list[Conversation]:
    """Return the conversations. Raises ConfigError if they are too large, or there is no token for them.

    `as_text`: turns are messages, which `tokenizer` makes of the tokens; otherwise token ids.
    `with_responses`: turns have responses of their output lengths.
    """
    source = token_source(tokenizer, vocab_size, spec.text_file)
    if not len(source):
        raise ConfigError(f"none of the model's {vocab_size} tokens is free for random conversations")
    if as_text and isinstance(tokenizer, NoTokenizer):
        raise ConfigError(
            f"{tokenizer.why}; a chat endpoint needs texts, which the tokenizer makes: copy it from the model"
        )
    sizes, n = spec.sizes, spec.num_conversations
    n_requests = n * sizes.turns.mean  # checked before anything is generated
    _check_size(n_requests, n * (sizes.system + sizes.prefix) + n_requests * sizes.input.mean)
    maker = _Maker(spec, source, tokenizer if as_text else None, with_responses)
    return [maker.conversation(number) for number in range(n)]


def _check_size(n_requests: float, n_tokens: float) -> None:
    """Raise ConfigError if conversations would take too much memory."""
    if n_requests > _MAX_REQUESTS or n_tokens > _MAX_TOKENS:
        raise ConfigError(
            f"the conversations have more than {_MAX_REQUESTS:,} requests or {_MAX_TOKENS:,} tokens,"
            " which do not fit the memory"
        )


class _Maker:
    def __init__(
        self,
        spec: SyntheticConversations,
        source: TokenSource,
        tokenizer: Tokenizer | None,
        with_responses: bool,
    ) -> None:
        self._sizes, self._seed, self._source = spec.sizes, spec.seed, source
        self._tokenizer, self._with_responses = tokenizer, with_responses
        self._n_requests = self._n_tokens = 0
        self._system = self._tokens(self._random(_SYSTEM, 0), spec.sizes.system)
        self._prefixes: dict[int, NDArray[np.int32]] = {}  # by group
        self._shares: NDArray[np.float64] | None = None  # of conversations in the groups so far, but the last
        if spec.sizes.zipf:
            shares = np.cumsum(np.arange(1, spec.sizes.groups + 1) ** -spec.sizes.zipf)
            self._shares = shares[:-1] / shares[-1]

    def conversation(self, number: int) -> Conversation:
        sizes, random = self._sizes, self._random(_CONVERSATION, number)
        n_turns = min(int(draw_lengths(random, sizes.turns, 1)[0]), MAX_TURNS)
        inputs, outputs = (draw_lengths(random, spread, n_turns) for spread in (sizes.input, sizes.output))
        delays = draw_seconds(random, sizes.delay, n_turns)
        delays[0] = 0.0  # no response is before the first request
        self._n_requests += n_turns
        self._n_tokens += sizes.system + sizes.prefix + int(inputs.sum())
        self._n_tokens += int(outputs.sum()) if self._with_responses else 0
        _check_size(self._n_requests, self._n_tokens)
        added = [self._tokens(random, n) for n in inputs.tolist()]
        added[0] = np.concatenate([self._prefix(number), added[0]])
        responses: list[NDArray[np.int32] | None] = [None] * n_turns
        if self._with_responses:
            responses = [self._tokens(random, n) for n in outputs.tolist()]
        system = list[Message]()
        if self._tokenizer is None:
            added[0] = np.concatenate([self._system, added[0]])
        elif len(self._system):
            system.append(self._message("system", self._system))
        rows = zip(added, responses, delays.tolist(), outputs.tolist(), strict=True)
        where = f"synthetic conversation {number}, turn"
        turns = [self._turn(f"{where} {i}", *row) for i, row in enumerate(rows)]
        return Conversation(f"synthetic-{number}", turns, system)

    def _turn(
        self,
        where: str,
        added: NDArray[np.int32],
        response: NDArray[np.int32] | None,
        delay_s: float,
        output_len: int,
    ) -> Turn:
        turn = Turn(where, [], delay_s=delay_s, output_len=output_len)
        if self._tokenizer is None:
            turn.tokens, turn.response_tokens = added, response
            return turn
        turn.added = [self._message("user", added)]
        if response is not None:
            turn.response = self._message("assistant", response)
        return turn

    def _message(self, role: str, tokens: NDArray[np.int32]) -> Message:
        assert self._tokenizer is not None
        return {"role": role, "content": self._tokenizer.decode(tokens)}

    def _prefix(self, number: int) -> NDArray[np.int32]:
        """Return the tokens that the conversation shares with its group."""
        group = self._group(number)
        if group not in self._prefixes:
            self._prefixes[group] = self._tokens(self._random(_GROUP, group), self._sizes.prefix)
        return self._prefixes[group]

    def _group(self, number: int) -> int:
        if self._shares is None:
            return number % self._sizes.groups
        return int(np.searchsorted(self._shares, self._random(_CHOICE, number).random(), side="right"))

    def _tokens(self, random: np.random.Generator, n: int) -> NDArray[np.int32]:
        return draw_tokens(random, self._source, n)

    def _random(self, stream: int, number: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, stream, number])
