"""The data sets that MLCommons and NVIDIA publish, tokenized beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpillm.preprocessed.loader import LLMDataLoader as LLMDataLoader


@dataclass(frozen=True)
class Columns:
    """What the columns of a published data frame are called."""

    tokens: str = "tok_input"
    lengths: str | None = None  # of `tokens`, as a check
    stop_words: str | None = None  # as tokens; only the end token: none
    references: tuple[str, ...] = ()  # what the answers are judged by


def __getattr__(name: str) -> Any:
    """`LLMDataLoader`, when it is first asked for: it needs numpy, and the workloads' names alone do not."""
    if name != "LLMDataLoader":
        raise AttributeError(name)
    from mpillm.preprocessed.loader import LLMDataLoader

    return LLMDataLoader
