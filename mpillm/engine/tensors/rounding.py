"""Round to 8 bits and back in plain PyTorch; fp8 (float8_e4m3fn) is fast even on CPUs without it."""

from __future__ import annotations

import torch
from torch import Tensor

from mpillm.engine.shape.dtypes import torch_dtype
from mpillm.engine.shape.quantization import BLOCK_SIZE

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
_LARGEST = {"int8": 127.0, "fp8": LARGEST}  # of the dtype; int8's -128 is unused


def to_fp8(x: Tensor, scales: Tensor) -> Tensor:
    """Return x / scales, rounded to nearest and clipped to `LARGEST`. `scales` broadcasts to x."""
    return (x.float() / scales).clamp_(-LARGEST, LARGEST).to(FP8)


def widen(numbers: Tensor) -> Tensor:
    """Return fp8 numbers as float32, exactly."""
    if numbers.device.type != "cpu":
        return numbers.float()
    # PyTorch 2.13 converts one number at a time. Reading e4m3 as float16's bits makes the exponent 8 too
    # small; correcting that is six times as fast as PyTorch's conversion.
    return ((numbers.view(torch.int8).to(torch.int16) << 7) & ~0x407F).view(torch.float16).float().mul_(256)


def quantize_rows(matrix: Tensor, algorithm: str) -> tuple[Tensor, Tensor]:
    """Return 8-bit numbers [n, m] and float32 scales [n, 1] of `matrix` [n, m]; a zero row has scale 1."""
    matrix = matrix.float()
    largest = matrix.abs().amax(1, keepdim=True)
    scales = torch.where(largest == 0, 1.0, largest / _LARGEST[algorithm])  # keeps values that are not finite
    scaled = (matrix / scales).clamp_(-_LARGEST[algorithm], _LARGEST[algorithm])
    if algorithm == "int8":
        scaled.round_()
    return scaled.to(torch_dtype(algorithm)), scales


def dequantize_rows(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values that `quantize_rows` encoded, rounded once, to `dtype`."""
    wide = widen(numbers) if numbers.dtype == FP8 else numbers.float()
    return wide.mul_(scales).to(dtype)


def dequantize_blocks(numbers: Tensor, scales: Tensor, rows: slice, columns: slice) -> Tensor:
    """Return float32 values of fp8 `numbers`, the `rows` and `columns` of a matrix with block `scales`."""
    blocks = [
        torch.arange(n * BLOCK_SIZE)[part][:size] // BLOCK_SIZE
        for n, part, size in zip(scales.shape, (rows, columns), numbers.shape, strict=True)
    ]
    return widen(numbers) * scales.float()[blocks[0]][:, blocks[1]]
