"""The data sets that MLCommons and NVIDIA publish, tokenized beforehand. What reads them, in `loader`, needs numpy; this does not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Columns:
    """What the columns of a published data frame are called."""

    tokens: str = "tok_input"
    lengths: str | None = None  # of `tokens`, as a check
    stop_words: str | None = None  # as tokens; only the end token: none
    references: tuple[str, ...] = ()  # what the answers are judged by
