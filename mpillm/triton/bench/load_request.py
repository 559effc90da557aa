"""Requests of a load, and their lengths. Needs no package of Triton's clients."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class LoadRequest(NamedTuple):
    """A prompt, and the length of its answer, which no token ends."""

    prompt: NDArray[np.int32]
    output_len: int


def lengths(mean: float, stdev: float, n: int, random: np.random.Generator) -> list[int]:
    """Draw `n` lengths from a normal distribution, rounded up, at least 1."""
    return [max(1, int(value)) for value in np.ceil(random.normal(mean, stdev, n)).tolist()]
