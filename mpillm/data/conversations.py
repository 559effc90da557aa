"""Conversations: turns, each a request that follows the previous response."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpillm.data.records import Prompt, Trace
from mpillm.data.row_fields import NO_FIELDS, OwnFields

Message = dict[str, Any]

_MAX_TURNS = 100_000  # of one conversation


@dataclass(slots=True)
class Turn:
    """One request of a conversation."""

    where: str  # the row, for messages
    added: list[Message]  # that the request adds to the conversation
    response: Message | None = None  # recorded, for the requests that follow; None: the file has none
    prompt: Prompt | None = None  # the complete prompt, without the conversation so far; None: use `added`
    delay_s: float = 0.0  # from the previous response to the request
    at_s: float | None = None  # time stamp of the request; None: it has none
    output_len: int | None = None  # tokens
    unused: frozenset[str] = frozenset()  # the row's keys that have no effect
    own: OwnFields = NO_FIELDS
    tools: list[Any] | None = None  # only of a complete prompt; others have the conversation's
    trace: Trace | None = None  # of the tokens that the request adds, until there are `tokens` or `added`
    # Only in traces and synthetic conversations of token ids, which have no messages:
    tokens: NDArray[np.int32] | None = None  # that the request adds to the conversation
    response_tokens: NDArray[np.int32] | None = None  # for the requests that follow

    @property
    def has_response(self) -> bool:
        """Whether the response is known before the test, or no later request needs it."""
        return not (self.response is None and self.response_tokens is None and self.prompt is None)


@dataclass(slots=True)
class Branch:
    """A conversation that begins after the response to a request of another one, its parent."""

    conversation: Conversation
    after: int  # the parent's turn, from 0, whose response comes before
    join: int | None = None  # the parent's turn that waits for the end of the branch; None: none does


@dataclass(slots=True)
class Conversation:
    """Turns in their order. The first one's `at_s`, if it has one, is the conversation's arrival.

    A root conversation is not a branch. With its branches, their branches and so on, it is a tree.
    """

    name: str
    turns: list[Turn] = field(default_factory=list)
    system: list[Message] = field(default_factory=list)  # messages before the first turn's
    tools: list[Any] | None = None
    last_at_s: float | None = None  # the largest time stamp of its turns
    branches: list[Branch] = field(default_factory=list)
    parent: Conversation | None = field(default=None, compare=False, repr=False)  # whose branch it is
    n_inherited: int = 0  # turns of its history, which are the parent's; 0: it begins with its own

    def tree(self) -> Iterator[Conversation]:
        """Yield the conversation, and the trees of its branches in their order."""
        pending = [self]
        while pending:
            yield (one := pending.pop())
            pending += [branch.conversation for branch in reversed(one.branches)]

    @property
    def history(self) -> list[Turn]:
        """The turns of the last request's prompt: those of its parents, and its own."""
        if self.parent is None or not self.n_inherited:
            return self.turns
        return self.parent.history[: self.n_inherited] + self.turns

    @property
    def answered_turns(self) -> list[Turn]:
        """The turns whose responses are in its prompts, but not in those of its parent."""
        if self.parent is None or not self.n_inherited:
            return self.turns[:-1]
        last = self.parent.turns[self.n_inherited - self.parent.n_inherited - 1]
        return [last, *self.turns[:-1]]

    @property
    def has_responses(self) -> bool:
        """Whether the file has the response of every turn that another one follows."""
        return all(turn.has_response for turn in self.answered_turns)

    @property
    def is_tokens(self) -> bool:
        """Whether its turns are token ids, not messages."""
        return self.turns[0].tokens is not None

    @property
    def recorded_responses(self) -> list[Message | None]:
        """The responses that the file has, of its history."""
        return [turn.response for turn in self.history]

    def messages(self, responses: Sequence[Message | None]) -> list[Message]:
        """Return the messages of the request after `responses`, which follow its history's first turns."""
        messages, turns = list(self.system), self.history
        for turn, response in zip(turns, responses, strict=False):
            messages += turn.added
            if response is not None:
                messages.append(response)
        return messages + turns[len(responses)].added


def token_parts(
    turns: Sequence[Turn], responses: Sequence[NDArray[np.int32] | None]
) -> Iterator[NDArray[np.int32]]:
    """Yield the parts of a prompt of token ids: what each request adds, and the responses between them."""
    for turn, response in zip_longest(turns, responses):
        assert turn.tokens is not None
        yield turn.tokens
        if response is not None:
            yield response


def append(conversation: Conversation, turn: Turn) -> None:
    """Add a turn. Raises ValueError for a time stamp before an earlier one, or too many turns."""
    if turn.at_s is not None:
        before = conversation.last_at_s
        if before is not None and turn.at_s < before:
            raise ValueError(
                f"timestamp {turn.at_s * 1e3:.12g} is before the previous turn's, {before * 1e3:.12g}"
            )
        conversation.last_at_s = turn.at_s
    if len(conversation.turns) == _MAX_TURNS:
        raise ValueError(f"conversation {conversation.name} has more than {_MAX_TURNS:,} requests")
    conversation.turns.append(turn)
