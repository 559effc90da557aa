"""Prompts of conversations whose earlier responses were generated in the test."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError
from mpillm.data.conversations import Conversation, Message
from mpillm.data.dataset import PromptLimits, check_lengths, tokens_of
from mpillm.data.tokenizer import Tokenizer


class GeneratedHistory:
    """Makes the prompts. May be used by one thread at a time."""

    def __init__(
        self, conversations: Sequence[Conversation], tokenizer: Tokenizer, limits: PromptLimits
    ) -> None:
        """`tokenizer`: the model's, or `ChatRequests` for a chat endpoint."""
        self._conversations, self._tokenizer, self._limits = conversations, tokenizer, limits

    def message(self, tokens: NDArray[np.int32]) -> Message:
        """Return a response, given as tokens, as a message."""
        return {"role": "assistant", "content": self._tokenizer.decode(tokens)}

    def prompt(self, number: int, responses: Sequence[Message]) -> NDArray[np.int32]:
        """Return the tokens of a conversation's request after `responses`. May take long.

        `number`: of the conversation. A response with calls of tools, whose results follow, is the recorded
        one. Raises ConfigError with the place of the turn if the prompt exceeds a limit, or has no tokens.
        """
        conversation = self._conversations[number]
        turn = conversation.turns[len(responses)]
        try:
            if turn.prompt is not None:
                vocab_size = self._limits.vocab_size or self._tokenizer.vocab_size
                tokens = np.array(tokens_of(turn.prompt, self._tokenizer, vocab_size), np.int32)
            else:
                messages = conversation.messages(
                    [
                        recorded if recorded and recorded.get("tool_calls") else response
                        for recorded, response in zip(
                            conversation.recorded_responses, responses, strict=False
                        )
                    ]
                )
                tokens = np.array(self._tokenizer.encode_chats([messages], conversation.tools)[0], np.int32)
        except ConfigError as error:
            raise ConfigError(f"{turn.where}: {error}") from error
        check_lengths(np.array([len(tokens)]), self._limits, lambda _: turn.where)
        return tokens
