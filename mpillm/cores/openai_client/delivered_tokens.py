"""Tokens of answers, as they come: what has been told of each, and what is new.

Of a server that sends text they are made here.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpillm.cores.openai_client.answer import AnswerError, text_of
from mpillm.cores.openai_client.client import Call
from mpillm.data.tokenizer import Tokenizer

UNKNOWN = 0  # in the place of the id of a token that only its server knows
_HALVES = tuple(map(chr, range(0xD800, 0xDC00)))  # the first ones, of characters in two pieces


class Told:
    """What has been told of an open answer."""

    __slots__ = ("again", "n_texts", "tokens")

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = [*tokens]
        self.n_texts = 0  # pieces of text that they stand for
        self.again = False  # another server begins anew: the rest comes with the end


class AnswerTokens:
    """Of all servers of a client."""

    def __init__(self, tokenizer: Tokenizer | None, counted: bool = False) -> None:
        """`tokenizer`: None if no server sends text; `counted`: the servers count the tokens of a text, whose
        ids are unknown."""
        self._tokenizer, self._counted = tokenizer, counted
        self._by_pieces = tokenizer is not None and keeps_pieces(tokenizer)

    def of(self, call: Call) -> list[int]:
        """Return the tokens that have come."""
        assert call.endpoint is not None
        if call.endpoint.dialect.token_ids:
            return call.answer.tokens
        if self._counted:
            return [UNKNOWN] * self._n_counted(call)
        assert self._tokenizer is not None
        return self._tokenizer.encode_plain(call.answer.text)

    def _n_counted(self, call: Call) -> int:
        """Return how many tokens there are: until the answer has ended, one if a text has come."""
        answer = call.answer
        if answer.finish_reason is None:
            return min(1, answer.size)
        if answer.completion_tokens is None:
            raise AnswerError("no usage in its answer: name the folder of the tokenizer with --model_path")
        return answer.completion_tokens

    def new(self, call: Call, told: Told) -> list[int]:
        """Return those that are not told; of text, the tokens of its pieces, which are told with that."""
        assert call.endpoint is not None
        if call.endpoint.dialect.token_ids:
            return call.answer.tokens[len(told.tokens) :]
        pieces = call.answer.texts[told.n_texts :]
        if not self._by_pieces or (pieces and pieces[-1].endswith(_HALVES)):
            return []
        told.n_texts = len(call.answer.texts)
        return self._encoded(text_of(pieces))

    def whole(self, call: Call, told: Told | None) -> list[int]:
        """Return the answer, which has ended; a server that was started again may not begin as `told`."""
        if told is not None and told.n_texts and not told.again:
            return told.tokens + self._encoded(text_of(call.answer.texts[told.n_texts :]))
        return self.of(call)

    def _encoded(self, text: str) -> list[int]:
        assert self._tokenizer is not None
        return self._tokenizer.encode_plain(text) if text else []


def keeps_pieces(tokenizer: Tokenizer) -> bool:
    """Return whether a text's pieces can be made tokens one by one: some tokenizers add a space to each."""
    pieces = ("a", "b", " c", " ", "d")
    tokens = [token for piece in pieces for token in tokenizer.encode_plain(piece)]
    return tokenizer.decode(tokens, keep_special=True) == "".join(pieces)
