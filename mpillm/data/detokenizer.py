"""Text of an answer as its tokens come: joined, its pieces are what `Tokenizer.decode` makes of them."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from mpillm.data.tokenizer import ByteTokenizer, Tokenizer

_REPLACEMENT = "\ufffd"  # of bytes that are no UTF-8, or not yet
_CHARACTER = 4  # bytes, and so tokens, at most
_MOST_HELD = 8  # tokens: with so many some are no UTF-8 for good


class Detokenizer:
    """Holds back the tokens whose bytes may be the beginning of a character.

    The text of a token depends on the one before it (SentencePiece drops the space before the first), so each
    piece is the difference of two short decodings with some context, as vLLM and Hugging Face's
    text-generation-inference have it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes = (
            codecs.getincrementaldecoder("utf-8")("replace") if type(tokenizer) is ByteTokenizer else None
        )
        self._tokens: list[int] = []
        # Decoded so far are tokens [:read], the last of them from [context:read].
        self._context = self._read = 0
        self._context_text = ""
        self._length = 0  # of the text that was given

    def add(self, tokens: Sequence[int]) -> str:
        """Return the text that these tokens add."""
        if self._bytes is not None:
            return self._bytes.decode(bytes(token if 0 <= token < 256 else 0xFF for token in tokens))
        self._tokens += tokens
        text, end = self._certain()
        if len(text) <= len(self._context_text):
            return ""
        piece = text[len(self._context_text) :]
        self._context, self._read = self._read, end
        self._context_text = self._tokenizer.decode(self._tokens[self._context : end])
        self._length += len(piece)
        return piece

    def _certain(self) -> tuple[str, int]:
        """Return the text from the context on that no later token changes, and where its tokens end."""
        n = len(self._tokens)
        for end in range(n, max(self._read, n - _CHARACTER), -1):
            text = self._tokenizer.decode(self._tokens[self._context : end])
            if not text.endswith(_REPLACEMENT):
                return text, end
        if n - self._read <= _MOST_HELD:
            return "", self._read
        return self._tokenizer.decode(self._tokens[self._context :]), n

    def end(self) -> str:
        """Return the text of what was held back."""
        if self._bytes is not None:
            return self._bytes.decode(b"", final=True)
        return self._tokenizer.decode(self._tokens)[self._length :]


class StopStrings:
    """Ends a text before the first of some strings, and holds back what may become one."""

    def __init__(self, strings: Sequence[str]) -> None:
        """`strings`: none of them empty."""
        self._strings = strings
        self._held = ""
        self.found: str | None = None

    def add(self, piece: str) -> str:
        """Return as much of the text as can't belong to one of the strings; empty from when one is found."""
        if self.found is not None:
            return ""
        text = self._held + piece
        hits = [(at, string) for string in self._strings if (at := text.find(string)) >= 0]
        if hits:
            at, self.found = min(hits)
            self._held = ""
            return text[:at]
        held = max((_overlap(text, string) for string in self._strings), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def end(self) -> str:
        """Return what was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, string: str) -> int:
    """Return the length of the longest end of `text` that begins `string`, which `text` does not have."""
    return next((n for n in range(min(len(string) - 1, len(text)), 0, -1) if text.endswith(string[:n])), 0)
