"""Prompts of conversations whose earlier responses were generated in the test."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError
from mpillm.data.chat_request import ChatRequests
from mpillm.data.chat_template import Messages, Tools
from mpillm.data.conversations import Conversation, Message, token_parts
from mpillm.data.dataset import PromptLimits, check_lengths, tokens_of
from mpillm.data.row_fields import with_fields
from mpillm.data.tokenizer import Tokenizer


class History(Protocol):
    """Makes the prompts. May be used by one thread at a time."""

    def message(self, tokens: NDArray[np.int32]) -> Any:
        """Return a response, given as tokens, in the form that `prompt` takes."""

    def prompt(self, number: int, responses: Sequence[Any]) -> NDArray[np.int32]:
        """Return the tokens of a conversation's request after `responses`. May take long.

        `number`: of the conversation; `responses`: to the first turns of its history. Raises, with the place
        of the turn, PromptTooLong if the prompt exceeds a limit, and ConfigError if it cannot be made.
        """


class TokenHistory(History):
    """Prompts of conversations of token ids."""

    def __init__(self, conversations: Sequence[Conversation], limits: PromptLimits) -> None:
        self._conversations, self._limits = conversations, limits

    def message(self, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        return tokens.copy()  # the array is a view of a message with other responses

    def prompt(self, number: int, responses: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
        turns = self._conversations[number].turns[: len(responses) + 1]
        tokens = np.concatenate([*token_parts(turns, responses)])
        check_lengths(np.array([len(tokens)]), self._limits, lambda _: turns[-1].where)
        return tokens


class GeneratedHistory(History):
    """Prompts of conversations of messages."""

    def __init__(
        self, conversations: Sequence[Conversation], tokenizer: Tokenizer, limits: PromptLimits
    ) -> None:
        """`tokenizer`: the model's, or `ChatRequests` for a chat endpoint."""
        self._conversations, self._tokenizer, self._limits = conversations, tokenizer, limits

    def message(self, tokens: NDArray[np.int32]) -> Message:
        return {"role": "assistant", "content": self._tokenizer.decode(tokens)}

    def prompt(self, number: int, responses: Sequence[Message]) -> NDArray[np.int32]:
        """Do as `History.prompt`. All calls of tools are recorded ones, because only their results follow."""
        conversation = self._conversations[number]
        turn = conversation.history[len(responses)]
        try:
            if turn.prompt is not None:
                vocab_size = self._limits.vocab_size or self._tokenizer.vocab_size
                own = tokens_of(turn.prompt, self._tokenizer, vocab_size, turn.tools)
                tokens = np.array(own, np.int32)
            else:
                pairs = zip(conversation.recorded_responses, responses, strict=False)
                messages = conversation.messages([_with_recorded_calls(*pair) for pair in pairs])
                tokens = self._encoded(messages, conversation.tools)
        except ConfigError as error:
            raise ConfigError(f"{turn.where}: {error}") from error
        if turn.own.body:
            tokens = np.concatenate([np.array(with_fields(array("i"), turn.own.body), np.int32), tokens])
        check_lengths(np.array([len(tokens)]), self._limits, lambda _: turn.where)
        return tokens

    def _encoded(self, messages: Messages, tools: Tools) -> NDArray[np.int32]:
        if isinstance(self._tokenizer, ChatRequests):  # no list of all bytes, which would delay other threads
            return self._tokenizer.tokens_of(messages, tools)
        return np.array(self._tokenizer.encode_chats([messages], tools)[0], np.int32)


def _with_recorded_calls(recorded: Message | None, response: Message) -> Message:
    if recorded and recorded.get("tool_calls"):
        return recorded
    if not response.get("tool_calls"):
        return response
    return {"role": "assistant", "content": response.get("content") or ""}
