"""Choose how many tokens of prompts a step takes beside the sequences that generate.

Generating sequences wait for the whole step, so a piece is small. Below some size, prompts are computed more
slowly, because a step reads weights, or starts products, for too few rows.
"""

from __future__ import annotations

from collections.abc import Callable

_SMALLEST = 32
_WORTH_DOUBLING = 1.05  # times as many tokens/s


def context_piece(seconds: Callable[[int], float], max_tokens: int) -> int:
    """Return the prompt tokens of a step: 32, 64, 128, … or `max_tokens`.

    It is the first size at which twice as many tokens are not computed 5 % faster.

    `seconds` measures a step of so many prompt tokens. It is called once for each size in order, up to twice
    the size returned.
    """
    size, rate = _SMALLEST, 0.0
    while size <= max_tokens:
        faster = size / seconds(size)
        if faster < _WORTH_DOUBLING * rate:
            return size // 2
        size, rate = 2 * size, faster
    return max_tokens
