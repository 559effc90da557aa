"""Random numbers of synthetic data: lengths, and tokens, which may be those of a text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError, about
from disagg.text_file import check_file
from mpillm.data.tokenizer import Tokenizer
from mpillm.options.synthetic_conversations import Normal, Spread, Uniform

MAX_LENGTH = 1 << 40  # tokens of a synthetic prompt or answer, so that sums of lengths do not overflow
_MAX_TEXT = 1 << 25  # bytes of a text file
TokenSource: TypeAlias = "range | NDArray[np.int32]"


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


def _draw(random: np.random.Generator, spread: Normal, n: int) -> NDArray[np.float64]:
    if not spread.is_log or not spread.mean:
        return random.normal(spread.mean, spread.stdev, n)
    variance = math.log1p((spread.stdev / spread.mean) ** 2)  # of the logarithm
    return random.lognormal(math.log(spread.mean) - variance / 2, math.sqrt(variance), n)


def plain_tokens(tokenizer: Tokenizer, vocab_size: int) -> range:
    """Return the ids of random tokens: none of them is special. May be empty in a small vocabulary."""
    return range(vocab_size)[tokenizer.plain_tokens.start : tokenizer.plain_tokens.stop]


def token_source(tokenizer: Tokenizer, vocab_size: int, text_file: Path | None) -> TokenSource:
    """Return what synthetic prompts are drawn from; may be empty. Raises ConfigError for an unusable file."""
    if text_file is None:
        return plain_tokens(tokenizer, vocab_size)
    return _text_tokens(text_file, tokenizer, vocab_size)


@about("synthetic_text")
def _text_tokens(file: Path, tokenizer: Tokenizer, vocab_size: int) -> NDArray[np.int32]:
    check_file(file, f"--synthetic_text {file}")
    try:
        with file.open("rb") as stream:
            content = stream.read(_MAX_TEXT + 1)
        if len(content) > _MAX_TEXT:  # and its last character may be cut
            raise ConfigError(f"--synthetic_text {file}: more than {_MAX_TEXT >> 20} MiB")
        text = content.decode()
    except OSError as error:
        raise ConfigError(f"--synthetic_text {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--synthetic_text {file}: not UTF-8 text") from None
    tokens = np.array(tokenizer.encode_plain(text), np.int32)
    if not len(tokens) or tokens.max() >= vocab_size:
        raise ConfigError(
            f"--synthetic_text {file}: "
            + (f"token {tokens.max()}, the model knows {vocab_size} tokens" if len(tokens) else "no token")
        )
    return tokens


def draw_tokens(random: np.random.Generator, source: TokenSource, n: int) -> NDArray[np.int32]:
    """Return `n` token ids: uniform over a range, or those of a text from a random place on."""
    if isinstance(source, range):
        return random.integers(source.start, source.stop, n, np.int32)
    start = int(random.integers(len(source)))
    return source.take(np.arange(start, start + n), mode="wrap")
