"""Triton kernels before and after products with fp8 weights, on NVIDIA GPUs: rounding rows, and scaling."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpillm.engine.kernels.launch import Kernel, cdiv, next_power_of_2
from mpillm.engine.kernels.ops import RoundedRows, UnscaledProduct

SCALED_ROWS = 1024  # from so many rows on, a product that also applies scales is as fast as one without


@triton.jit
def nearest_fp8(value):
    """Return the float8_e4m3fn numbers nearest to `value` (float32, at most 448 in size), as float32.

    Integer arithmetic, because ptxas 12.8 miscompiles a conversion to fp8 and back: half the numbers come
    from an unrelated register.
    """
    bits = value.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    subnormal = (value + 24576.0) - 24576.0  # near 24,576, float32 numbers are multiples of 2^-9
    return tl.where(tl.abs(value) < 0.015625, subnormal, normal)


@triton.jit
def scaled_down(value, LARGEST: tl.constexpr):
    """Return a whole row (float32) divided by its scale, and the scale."""
    largest = tl.max(tl.abs(value))
    scale = tl.where(largest == 0, 1.0, largest / LARGEST)
    # The quotient may exceed the type's largest number by its last bit.
    return tl.minimum(tl.maximum(value / scale, -LARGEST), LARGEST), scale


@triton.jit
def store_rounded(out, scales, row, width, column, value, LARGEST: tl.constexpr):
    """Store `value` (float32), a whole row, as fp8 with its scale."""
    scaled, scale = scaled_down(value, LARGEST)
    tl.store(scales + row, scale)
    tl.store(out + row * width + column, scaled.to(out.dtype.element_ty), mask=column < width)


@Kernel
@triton.jit
def _quantize_rows(out, scales, x, width, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    value = tl.load(x + row * width + column, mask=column < width, other=0.0).to(tl.float32)
    store_rounded(out, scales, row, width, column, value, LARGEST)


def new_rounded(n: int, width: int, like: Tensor) -> RoundedRows:
    """Allocate memory for rounded rows on the device of `like`."""
    numbers = torch.empty(n, width, dtype=torch.float8_e4m3fn, device=like.device)
    return RoundedRows(numbers, torch.empty(n, 1, dtype=torch.float32, device=like.device), like.dtype)


def quantize_rows(x: Tensor) -> RoundedRows:
    """Return x [n, width] as float8_e4m3fn, and scales float32 [n, 1]: see `quantize.quantize_rows`."""
    n, width = x.shape
    out = new_rounded(n, width, x)
    block = next_power_of_2(width)
    _quantize_rows[(n,)](
        out.numbers, out.scales, x, width, LARGEST=448.0, BLOCK=block, num_warps=min(16, max(1, block // 512))
    )
    return out


@triton.jit
def load_scaled(product, row_scales, scales, row, width, column, mask, UNSCALED: tl.constexpr):
    """Return columns of a product's row as float32; multiply them by their scales if it is UNSCALED."""
    value = tl.load(product + row * width + column, mask=mask, other=0.0).to(tl.float32)
    if UNSCALED:
        value *= tl.load(row_scales + row) * tl.load(scales + column, mask=mask, other=0.0)
    return value


def parts_of(product: Tensor | UnscaledProduct) -> tuple[UnscaledProduct, bool]:
    """Return a kernel's arguments for a product, and whether the kernel must scale it."""
    if isinstance(product, UnscaledProduct):
        return product, True
    return UnscaledProduct(product, product, product), False


@Kernel
@triton.jit
def _scale(out, product, row_scales, scales, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < width
    value = load_scaled(product, row_scales, scales, row, width, column, real, True)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=real)


def scaled(product: Tensor | UnscaledProduct) -> Tensor:
    """Compute `ops.scaled`."""
    if isinstance(product, Tensor):
        return product
    out, width = torch.empty_like(product.numbers), product.numbers.shape[1]
    _scale[(len(out), cdiv(width, 1024))](out, *product, width, BLOCK=1024)
    return out
