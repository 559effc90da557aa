"""MXFP4 (OCP Microscaling Formats, 1.0): numbers of 4 bits (e2m1), and an exponent for each 32 of a row.

As tensors: bytes [n, m / 2], each with two numbers, the first in its lower half, and exponents plus a bias of
127, uint8 [n, m / 32].
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from mpillm.engine.shape.entries import BLOCK, NO_NUMBER

if TYPE_CHECKING:
    from torch import Tensor

BIAS = 127  # of exponents
# Magnitude of a number, by its lower three bits. The fourth bit is its sign.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LARGEST_POWER = 2  # of two, among the magnitudes
# Midpoints: larger numbers are rounded to the next magnitude. A midpoint itself is rounded to the even
# magnitude.
_MIDPOINTS = [(low + high) / 2 for low, high in itertools.pairwise(MAGNITUDES)]


def numbers_of(blocks: Tensor) -> Tensor:
    """Return the bits of one number in each byte: uint8 [n, m], from bytes [n, m / 2]."""
    import torch

    return torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)


def widened(blocks: Tensor, exponents: Tensor) -> Tensor:
    """Return the numbers as float32 [n, m], exactly."""
    import torch
    import torch.nn.functional as F

    values = torch.tensor([*MAGNITUDES, *(-x for x in MAGNITUDES)], device=blocks.device)
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=1)  # of each byte
    numbers = F.embedding(blocks.int(), pairs).view(*exponents.shape, BLOCK)
    factors = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - BIAS)
    scaled: Tensor = numbers * factors[..., None]
    return scaled.flatten(-2)


def rounded(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return bytes and exponents nearest to `matrix` [n, m], as the format's paper rounds.

    A block's largest number has the largest exponent of e2m1; numbers above 6, in units of the block's
    factor, become 6.
    """
    import torch

    blocks = matrix.float().reshape(*matrix.shape[:-1], -1, BLOCK)
    powers = torch.frexp(blocks.abs().amax(-1)).exponent - 1 - _LARGEST_POWER
    exponents = (powers + BIAS).clamp(0, NO_NUMBER - 1)
    scaled = torch.ldexp(blocks, (BIAS - exponents)[..., None])
    edges = torch.tensor(_MIDPOINTS, device=matrix.device)
    # A tie goes to the even magnitude: upwards from the odd ones, that is from the second, fourth and sixth.
    edges[::2] = edges[::2].nextafter(edges.new_tensor(torch.inf))
    bits = torch.bucketize(scaled.abs(), edges, right=True).to(torch.uint8)
    bits |= (scaled < 0).to(torch.uint8) << 3
    bits = bits.flatten(-2)
    return bits[..., ::2] | bits[..., 1::2] << 4, exponents.to(torch.uint8)
