"""Incremental text of a response. The joined pieces equal `Tokenizer.decode` of all tokens."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from mpillm.data.tokenizer import ByteTokenizer, Tokenizer

_REPLACEMENT = "\ufffd"  # for invalid or incomplete UTF-8
_CHARACTER = 4  # a character has at most 4 bytes, so at most 4 tokens
_MAX_PENDING = 8  # tokens; if more are pending, some bytes are certainly invalid


class Detokenizer:
    """Incremental decoder; delays tokens whose bytes may be the beginning of a character.

    The text of a token depends on the previous token (SentencePiece drops the space before the first token).
    So each piece is the difference of two short decodings with some context. vLLM and Hugging Face's
    text-generation-inference do the same.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes = (
            codecs.getincrementaldecoder("utf-8")("replace") if type(tokenizer) is ByteTokenizer else None
        )
        self._tokens: list[int] = []
        # Tokens [:read] are decoded. The last piece consists of tokens [context:read].
        self._context = self._read = 0
        self._context_text = ""
        self._length = 0  # of all text that `add` has returned

    def add(self, tokens: Sequence[int]) -> str:
        """Return the text that these tokens add."""
        if self._bytes is not None:
            return self._bytes.decode(bytes(token if 0 <= token < 256 else 0xFF for token in tokens))
        self._tokens += tokens
        text, end = self._certain()
        if len(text) <= len(self._context_text):
            if end > self._read:
                self._drop_silent()
            return ""
        piece = text[len(self._context_text) :]
        self._context, self._read = self._read, end
        self._context_text = self._tokenizer.decode(self._tokens[self._context : end])
        self._length += len(piece)
        return piece

    def _certain(self) -> tuple[str, int]:
        """Return the text after `_context` that no later token can change, and the end of its tokens."""
        n = len(self._tokens)
        for end in range(n, max(self._read, n - _CHARACTER), -1):
            text = self._tokenizer.decode(self._tokens[self._context : end])
            if not text.endswith(_REPLACEMENT):
                return text, end
        if n - self._read <= _MAX_PENDING:
            return "", self._read
        return self._tokenizer.decode(self._tokens[self._context :]), n

    def _drop_silent(self) -> None:
        """Drop new tokens that never have a text, such as repeated end tokens.

        Otherwise each later token decodes all of them again. Two of a token are decoded, because
        SentencePiece drops the first space of a text.
        """
        new = self._tokens[self._read :]
        texts = {token: self._tokenizer.decode([token, token]) for token in {*new}}
        self._tokens[self._read :] = [token for token in new if texts[token]]

    def end(self) -> str:
        """Return the text of the delayed tokens."""
        if self._bytes is not None:
            return self._bytes.decode(b"", final=True)
        return self._tokenizer.decode(self._tokens)[self._length :]


class StopStrings:
    """Ends a text before the first stop string, and delays a suffix that may become one."""

    def __init__(self, strings: Sequence[str]) -> None:
        """`strings`: must not be empty strings."""
        self._strings = strings
        self._pending = ""
        self.match: str | None = None

    def add(self, piece: str) -> str:
        """Return the text that cannot belong to a stop string; empty after a match."""
        if self.match is not None:
            return ""
        text = self._pending + piece
        hits = [(at, string) for string in self._strings if (at := text.find(string)) >= 0]
        if hits:
            at, self.match = min(hits)
            self._pending = ""
            return text[:at]
        n_pending = max((_overlap(text, string) for string in self._strings), default=0)
        self._pending = text[len(text) - n_pending :]
        return text[: len(text) - n_pending]

    def end(self) -> str:
        """Return the delayed suffix."""
        pending, self._pending = self._pending, ""
        return pending


def _overlap(text: str, string: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `string`."""
    return next((n for n in range(min(len(string) - 1, len(text)), 0, -1) if text.endswith(string[:n])), 0)
