"""The data sets that MLCommons and NVIDIA publish, tokenized beforehand. `loader` reads them, with numpy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Columns:
    """The names of a published data frame's columns."""

    tokens: str = "tok_input"
    lengths: str | None = None  # of `tokens`, as a check
    stop_words: str | None = None  # as tokens; a sample with only the end token has none
    references: tuple[str, ...] = ()  # which answers are scored against
