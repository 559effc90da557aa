"""Prompt lookup: draft the tokens that followed an earlier occurrence of the last tokens.

As in Saxena's prompt lookup decoding (2023), vLLM's `ngram` and TensorRT-LLM's `NGram` with `is_use_oldest`:
use the longest suffix, up to `longest` tokens, that occurs earlier in the sequence, and its first occurrence.
"""

from __future__ import annotations

from mpillm.engine.schedule.sequence import Sequence


class NGrams:
    """The n-grams of a sequence's tokens, each with the index of the token after its first occurrence."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after it

    def read(self, sequence: Sequence) -> None:
        """Add the sequence's new tokens since the last call."""
        tokens, n_prompt = self._tokens, len(sequence.prompt)
        n_read = len(tokens)
        tokens += sequence.prompt[n_read:]
        tokens += sequence.output[max(0, n_read - n_prompt) :]
        for at in range(max(1, n_read), len(tokens)):
            for n in range(1, min(self._longest, at) + 1):
                self._after.setdefault(tuple(tokens[at - n : at]), at)

    def draft(self, max_tokens: int) -> list[int]:
        """Return up to `max_tokens` tokens; none if even the last token is new."""
        tokens = self._tokens
        for n in range(min(self._longest, len(tokens)), 0, -1):
            if (at := self._after.get(tuple(tokens[-n:]))) is not None:
                return tokens[at : at + max_tokens]
        return []


class NGramDrafter:
    """Implements `speculation.Drafter`. It reads each token once, and needs no model."""

    def __init__(self, longest: int) -> None:
        """`longest`: tokens of the longest n-gram."""
        self._longest = longest
        self._of: dict[Sequence, NGrams] = {}

    def draft(self, requests: list[tuple[Sequence, int]]) -> list[list[int]]:
        for ended in [sequence for sequence in self._of if sequence.is_done]:
            del self._of[ended]
        drafts = []
        for sequence, max_tokens in requests:
            if (ngrams := self._of.get(sequence)) is None:
                ngrams = self._of[sequence] = NGrams(self._longest)
            ngrams.read(sequence)
            drafts.append(ngrams.draft(max_tokens))
        return drafts
