"""Random numbers of synthetic data: lengths, and tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mpillm.data.tokenizer import Tokenizer
from mpillm.options.synthetic_conversations import LogNormal, Normal, Spread, Uniform

MAX_LENGTH = 1 << 40  # tokens of a synthetic prompt or answer, so that sums of lengths do not overflow


def draw_lengths(random: np.random.Generator, spread: Spread, n: int) -> NDArray[np.int64]:
    """Return `n` whole numbers of at least 1. Those of a continuous distribution are rounded."""
    if isinstance(spread, Uniform):
        return random.integers(int(spread.low), int(spread.high), n, np.int64, endpoint=True)
    return np.clip(np.rint(_draw(random, spread, n)), 1, MAX_LENGTH).astype(np.int64)


def draw_seconds(random: np.random.Generator, spread: Spread, n: int) -> NDArray[np.float64]:
    """Return `n` durations of at least 0 seconds."""
    if isinstance(spread, Uniform):
        return random.uniform(spread.low, spread.high, n)
    return np.maximum(_draw(random, spread, n), 0.0)


def _draw(random: np.random.Generator, spread: Normal | LogNormal, n: int) -> NDArray[np.float64]:
    if isinstance(spread, LogNormal):
        return random.lognormal(*spread.of_logarithm, n)
    return random.normal(*spread, n)


def plain_tokens(tokenizer: Tokenizer, vocab_size: int) -> range:
    """Return the ids of random tokens: none of them is special. May be empty in a small vocabulary."""
    return range(vocab_size)[tokenizer.plain_tokens.start : tokenizer.plain_tokens.stop]


def draw_tokens(random: np.random.Generator, plain: range, n: int) -> NDArray[np.int32]:
    """Return `n` token ids, uniform over `plain`."""
    return random.integers(plain.start, plain.stop, n, np.int32)
