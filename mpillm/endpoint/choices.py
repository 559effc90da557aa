"""Turn the tokens of one choice into pieces of text, up to a stop string, a stop token or the last token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpillm.data.detokenizer import Detokenizer, StopStrings
from mpillm.endpoint import logprobs
from mpillm.endpoint.api_error import Json
from mpillm.endpoint.open_requests import PendingResponse
from mpillm.endpoint.protocol import CompletionRequest, ServedModel
from mpillm.endpoint.tool_calls import ToolCall, ToolCallReader

_SLICE = 2048  # tokens that are decoded together: other answers continue between slices


class Piece(NamedTuple):
    """The part of an answer since the previous piece."""

    text: str
    tokens: list[int]
    finish_reason: str | None  # stop or length; None: not the last piece
    stop_reason: str | int | None = None  # the stop string or stop token that ended the answer, if any
    calls: Sequence[ToolCall] = ()  # of tools, complete with this piece


class Choice:
    """Reads an answer while it grows."""

    def __init__(
        self,
        index: int,
        answer: PendingResponse,
        prompt: NDArray[np.int32],
        max_tokens: int,
        completion: CompletionRequest,
        served: ServedModel,
    ) -> None:
        self.index = index
        self.answer = answer
        self.prompt = prompt
        self.n_tokens = 0  # tokens that `take` has returned
        self.max_tokens = max_tokens
        self.completion = completion
        self._end_ids = served.end_ids if not completion.ignore_eos else frozenset()
        self._tokenizer = served.tokenizer
        self._detokenizer = Detokenizer(served.tokenizer)
        self._n_characters = 0  # characters of tokens whose log probabilities were returned
        self._stop = StopStrings(completion.stop)
        self._one_by_one = bool(completion.stop or completion.stop_token_ids)
        self.n_calls = 0  # calls of tools that `take` has returned
        reads_calls = bool(completion.tools) and served.tokenizer.writes_tool_calls
        self._tool_calls = ToolCallReader() if reads_calls else None

    def logprobs(self, first: int, tokens: list[int]) -> Json | None:
        """Return the log probabilities of `tokens`, which start at place `first` of the answer.

        None if they were not requested. Calls must follow the order of the answer, because each continues the
        count of text offsets.
        """
        if self.completion.logprobs is None:
            return None
        entries = [
            logprobs.read(token, self.answer.logprobs[place]) for place, token in enumerate(tokens, first)
        ]
        as_ids = self.completion.tokens_as_ids
        if self.completion.chat:
            return logprobs.chat(entries, self._tokenizer, as_ids=as_ids)
        result = logprobs.completion(entries, self._tokenizer, self._n_characters, as_ids=as_ids)
        self._n_characters += sum(map(len, result["tokens"]))
        return result

    def take(self) -> Piece | None:
        """Return the next piece, or None if nothing has arrived."""
        piece = self._next()
        if piece is None or self._tool_calls is None:
            return piece
        text, calls = self._tool_calls.add(piece.text, is_last=piece.finish_reason is not None)
        self.n_calls += len(calls)
        return piece._replace(text=text, calls=calls)

    def _next(self) -> Piece | None:
        """Return the next piece, with calls in its text."""
        new = self.answer.tokens[self.n_tokens : self.n_tokens + _SLICE]
        if not new and not self.answer.ended:
            return None
        is_last = self.answer.ended and self.n_tokens + len(new) == len(self.answer.tokens)
        if self._one_by_one:
            return self._take_one_by_one(new, is_last)
        self.n_tokens += len(new)
        text = self._detokenizer.add(new)
        if not is_last:
            return Piece(text, new, None)
        return Piece(text + self._detokenizer.end(), new, self._reason())

    def _take_one_by_one(self, new: list[int], is_last: bool) -> Piece:
        """Take the next piece token by token.

        The first token that completes a stop string, or is a stop token, ends the answer.
        """
        text = ""
        for i, token in enumerate(new):
            self.n_tokens += 1
            may_stop = self.n_tokens >= self.completion.min_tokens
            if may_stop and token in self.completion.stop_token_ids:
                return Piece(
                    text + self._stop.add(self._detokenizer.end()) + self._stop.end(),
                    new[: i + 1],
                    "stop",
                    token,
                )
            piece = self._detokenizer.add([token])
            text += self._stop.add(piece) if may_stop else piece
            if self._stop.match is not None:
                return Piece(text, new[: i + 1], "stop", self._stop.match)
        if not is_last:
            return Piece(text, new, None)
        text += self._stop.add(self._detokenizer.end()) + self._stop.end()
        return Piece(text, new, "stop" if self._stop.match is not None else self._reason(), self._stop.match)

    def _reason(self) -> str:
        """Return the finish reason of an answer without a stop string or stop token."""
        tokens = self.answer.tokens
        return "length" if len(tokens) >= self.max_tokens and tokens[-1] not in self._end_ids else "stop"
