"""Prompts of traces, which have only lengths and hashes of blocks: random tokens, or texts of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mpillm.data.random_tokens import draw_tokens, plain_tokens
from mpillm.data.records import Trace
from mpillm.data.tokenizer import Tokenizer


def trace_tokens(trace: Trace, tokenizer: Tokenizer, vocab_size: int, sample: int) -> NDArray[np.int32]:
    """Return random tokens. Blocks with equal hashes are equal.

    A block without a hash has the same tokens only in the same `sample`, a number.
    """
    return np.concatenate([*_blocks(trace, tokenizer, vocab_size, sample)])


def trace_text(trace: Trace, tokenizer: Tokenizer, sample: int) -> str:
    """Return a text of about the trace's length in tokens. Blocks are equal as in `trace_tokens`."""
    blocks = _blocks(trace, tokenizer, tokenizer.vocab_size, sample)
    return "".join(_text_of(block, tokenizer) for block in blocks)


def _text_of(tokens: NDArray[np.int32], tokenizer: Tokenizer) -> str:
    """Return a text with as many tokens.

    The text of random tokens usually has more tokens than these. So it is cut.
    """
    encoded = tokenizer.encode_plain(tokenizer.decode(tokens))
    return tokenizer.decode(encoded[: len(tokens)])


def _blocks(trace: Trace, tokenizer: Tokenizer, vocab_size: int, sample: int) -> Iterator[NDArray[np.int32]]:
    plain = plain_tokens(tokenizer, vocab_size) or range(vocab_size)
    for block, first in enumerate(range(0, trace.length, trace.block)):
        seed = [trace.hash_ids[block], 0] if block < len(trace.hash_ids) else [block, 1, sample]
        tokens = draw_tokens(np.random.default_rng(seed), plain, trace.block)
        yield tokens[: trace.length - first]
