"""Triton kernels around products with fp8 weights, on NVIDIA GPUs: rounding of rows, scales, and few rows.

A product of few rows takes as long as reading its weights from memory, if enough programs read at once. So a
program has a narrow tile of outputs; where the tiles are too few, several programs share one, each with a
part of the sum. The last to finish adds the parts, always in the same order, so that the result does not
depend on which it is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpillm.engine.kernels.launch import Kernel, cdiv, next_power_of_2
from mpillm.engine.model.ops import Rounded, Unscaled

# Most rows for `product_of_few_rows`. At batch 1 a step of Llama 8B took 2.98 ms with it, 3.18 with rounded
# rows and cuBLAS: rounding costs more there than it saves.
WIDENED_ROWS = 8
# Outputs and depth of a program's step, and programs wanted, measured on an H200 (docs/quantization.md).
_COLUMNS, _DEPTH, _PROGRAMS = 32, 128, 512
_MOST_SPLITS = 8
SCALED_ROWS = 1024  # from so many on, a product that scales its rows and outputs itself is as fast


@triton.jit
def nearest_fp8(value):
    """Return the float8_e4m3fn numbers nearest to `value` (float32, at most 448 in size), as float32.

    Where a kernel converted to fp8 and back, ptxas 12.8 took half the numbers from an unrelated register.
    """
    bits = value.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    subnormal = (value + 24576.0) - 24576.0  # float32 numbers there are multiples of 2^-9
    return tl.where(tl.abs(value) < 0.015625, subnormal, normal)


@triton.jit
def store_rounded(out, scales, row, width, column, value, LARGEST: tl.constexpr):
    """Store `value` (float32), a whole row, as fp8 with its scale."""
    largest = tl.max(tl.abs(value))
    scale = tl.where(largest == 0, 1.0, largest / LARGEST)
    tl.store(scales + row, scale)
    # The quotient may exceed the type's largest number by its last bit.
    scaled = tl.minimum(tl.maximum(value / scale, -LARGEST), LARGEST)
    tl.store(out + row * width + column, scaled.to(out.dtype.element_ty), mask=column < width)


@Kernel
@triton.jit
def _quantize_rows(out, scales, x, width, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    value = tl.load(x + row * width + column, mask=column < width, other=0.0).to(tl.float32)
    store_rounded(out, scales, row, width, column, value, LARGEST)


def new_rounded(n: int, width: int, like: Tensor) -> Rounded:
    """Return room for the rounded rows of `like`."""
    numbers = torch.empty(n, width, dtype=torch.float8_e4m3fn, device=like.device)
    return Rounded(numbers, torch.empty(n, 1, dtype=torch.float32, device=like.device), like.dtype)


def quantize_rows(x: Tensor) -> Rounded:
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
    """Return columns of a product's row as float32, with their scales if it is `Unscaled`."""
    value = tl.load(product + row * width + column, mask=mask, other=0.0).to(tl.float32)
    if UNSCALED:
        value *= tl.load(row_scales + row) * tl.load(scales + column, mask=mask, other=0.0)
    return value


def parts_of(product: Tensor | Unscaled) -> tuple[Unscaled, bool]:
    """Return what kernels take for a product, and whether they have to scale it."""
    if isinstance(product, Unscaled):
        return product, True
    return Unscaled(product, product, product), False


@Kernel
@triton.jit
def _scale(out, product, row_scales, scales, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < width
    value = load_scaled(product, row_scales, scales, row, width, column, real, True)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=real)


def scaled(product: Tensor | Unscaled) -> Tensor:
    """As `ops.scaled`."""
    if isinstance(product, Tensor):
        return product
    out, width = torch.empty_like(product.numbers), product.numbers.shape[1]
    _scale[(len(out), cdiv(width, 1024))](out, *product, width, BLOCK=1024)
    return out


@triton.jit
def _widened(numbers):
    """Return float8_e4m3fn as bfloat16, four at a time: the bits moved into place, times 2^120.

    The factor corrects the exponent. Triton's own conversion goes through float16, one number at a time, and
    is slower than memory.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, scale, none;
        prmt.b32 a, $2, 0, 0x1404;
        prmt.b32 b, $2, 0, 0x3424;
        shr.u32 c, a, 4;
        shr.u32 d, b, 4;
        and.b32 a, a, 0x80008000;
        and.b32 b, b, 0x80008000;
        lop3.b32 a, c, 0x07F007F0, a, 0xEA;
        lop3.b32 b, d, 0x07F007F0, b, 0xEA;
        mov.b32 scale, 0x7B807B80;
        mov.b32 none, 0x80008000;
        fma.rn.bf16x2 $0, a, scale, none;
        fma.rn.bf16x2 $1, b, scale, none;
        }""",
        "=r,=r,r", [numbers], dtype=tl.bfloat16, is_pure=True, pack=4,
    )  # fmt: skip


@Kernel
@triton.jit(do_not_specialize=["n"])
def _product(
    out, parts, arrived, x, weight, scales, n, n_out, n_in,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    row, column, depth = tl.arange(0, ROWS), tile * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    share = tl.cdiv(tl.cdiv(n_in, DEPTH), SPLITS) * DEPTH
    first = split * share
    a = weight + column.to(tl.int64)[:, None] * n_in + depth[None, :]
    b = x + row[None, :] * n_in + depth[:, None]
    total = tl.zeros([COLUMNS, ROWS], tl.float32)  # transposed: a tensor core's left operand is longer
    for at in range(first, tl.minimum(first + share, n_in), DEPTH):
        left = tl.load(a + at, mask=(column < n_out)[:, None] & (at + depth < n_in)[None, :], other=0.0)
        right = tl.load(b + at, mask=(row < n)[None, :] & (at + depth < n_in)[:, None], other=0.0)
        total = tl.dot(_widened(left), right.to(tl.bfloat16), total)
    real = (column < n_out)[:, None] & (row < n)[None, :]
    cell = row[None, :] * n_out + column[:, None]
    if SPLITS > 1:
        tl.store(parts + split * n * n_out + cell, total, mask=real)
        tl.debug_barrier()  # every thread has stored its part before one of them counts
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.store(arrived + tile, 0)  # for the next product
        total = tl.zeros([COLUMNS, ROWS], tl.float32)
        for i in range(SPLITS):
            total += tl.load(parts + i * n * n_out + cell, mask=real, other=0.0)
    total *= tl.load(scales + column, mask=column < n_out, other=0.0)[:, None]
    tl.store(out + cell, total.to(out.dtype.element_ty), mask=real)


def product_of_few_rows(x: Tensor, weight: Tensor, scales: Tensor, arrived: Tensor) -> Tensor:
    """Return x @ weight.T with the dtype of x.

    x [n, in]: floats of at most `WIDENED_ROWS` rows; weight: float8_e4m3fn [out, in], both multiples of 16;
    scales: float32, one per output; arrived: at least out / 16 zeros (int32), which are zeros again
    afterwards, for one product at a time.
    """
    n, (n_out, n_in) = len(x), weight.shape
    tiles = cdiv(n_out, _COLUMNS)
    splits = min(_MOST_SPLITS, next_power_of_2(cdiv(_PROGRAMS, tiles)), cdiv(n_in, _DEPTH))
    out = x.new_empty(n, n_out)
    parts = out if splits == 1 else x.new_empty(splits, n, n_out, dtype=torch.float32)
    _product[(tiles, splits)](
        out, parts, arrived, x, weight, scales, n, n_out, n_in,
        ROWS=WIDENED_ROWS, COLUMNS=_COLUMNS, DEPTH=_DEPTH, SPLITS=splits, num_warps=2, num_stages=6,
    )  # fmt: skip
    return out
