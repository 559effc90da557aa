"""Tokens of answers as they arrive: delivered and new ones. A server's text is tokenized here."""

from __future__ import annotations

from collections.abc import Sequence

from mpillm.cores.openai_client.answer import AnswerError, text_of
from mpillm.cores.openai_client.call import Call
from mpillm.cores.openai_client.dialect import remedy_without_usage
from mpillm.data.tokenizer import Tokenizer

UNKNOWN = 0  # in place of a token id that the server does not send
_MAX_COUNTED = 8  # times the requested tokens: servers may count more than the text, such as end tokens
_HIGH_SURROGATES = tuple(map(chr, range(0xD800, 0xDC00)))  # the first surrogates of characters in two pieces


class DeliveredTokens:
    """The delivered tokens of an open answer."""

    __slots__ = ("again", "n_texts", "tokens")

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = [*tokens]
        self.n_texts = 0  # pieces of text that became these tokens
        self.again = False  # a restarted server begins the answer again: other tokens follow at its end


class AnswerTokens:
    """Tokens of the answers of a client's servers."""

    def __init__(self, tokenizer: Tokenizer | None, counted: bool = False) -> None:
        """`tokenizer`: None if no server sends text.

        `counted`: servers send text, and count its tokens; the token ids are unknown.
        """
        self._tokenizer, self._counted = tokenizer, counted
        self._by_pieces = tokenizer is not None and keeps_pieces(tokenizer)

    def of(self, call: Call) -> list[int]:
        """Return the tokens of the answer so far."""
        assert call.endpoint is not None
        if call.endpoint.dialect.token_ids:
            return call.answer.tokens
        if self._counted:
            return [UNKNOWN] * self._n_counted(call)
        assert self._tokenizer is not None
        return self._tokenizer.encode_plain(call.answer.text)

    def _n_counted(self, call: Call) -> int:
        """Return the number of tokens; before the end of the answer, 1 if there is any text."""
        answer = call.answer
        if answer.finish_reason is None:
            return min(1, answer.size)
        if answer.completion_tokens is None:
            assert call.endpoint is not None
            remedy = remedy_without_usage(call.endpoint.dialect.path)
            raise AnswerError(f"no usage in its answer: {remedy}")
        if answer.completion_tokens > _MAX_COUNTED * (most := call.sampling.max_tokens):
            raise AnswerError(
                f"its usage has {answer.completion_tokens:,} tokens for an answer of at most {most:,}"
            )
        return answer.completion_tokens

    def new(self, call: Call, delivered: DeliveredTokens) -> list[int]:
        """Return the undelivered tokens; of text, the tokens of new pieces, which then count as delivered."""
        assert call.endpoint is not None
        if call.endpoint.dialect.token_ids:
            return call.answer.tokens[len(delivered.tokens) :]
        pieces = call.answer.texts[delivered.n_texts :]
        if not self._by_pieces or (pieces and pieces[-1].endswith(_HIGH_SURROGATES)):
            return []
        delivered.n_texts = len(call.answer.texts)
        return self._encoded(text_of(pieces))

    def final(self, call: Call, delivered: DeliveredTokens | None) -> list[int]:
        """Return the complete answer. That of a restarted server may not begin with `delivered`."""
        if delivered is not None and delivered.n_texts and not delivered.again:
            return delivered.tokens + self._encoded(text_of(call.answer.texts[delivered.n_texts :]))
        return self.of(call)

    def _encoded(self, text: str) -> list[int]:
        assert self._tokenizer is not None
        return self._tokenizer.encode_plain(text) if text else []


def keeps_pieces(tokenizer: Tokenizer) -> bool:
    """Return whether pieces of a text can be tokenized separately: some tokenizers add a space to each."""
    pieces = ("a", "b", " c", " ", "d")
    tokens = [token for piece in pieces for token in tokenizer.encode_plain(piece)]
    return tokenizer.decode(tokens, keep_special=True) == "".join(pieces)
