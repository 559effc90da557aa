"""Triton kernels of products with fp8 weights, on NVIDIA GPUs: rounding of rows, and products of few rows.

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

from mpillm.engine.model.ops import Rounded

# Measured on an H200 (docs/quantization.md). With 16 rows a step of Llama 70B took 24.6 ms with widened
# weights, 20.3 ms with x rounded.
WIDENED_ROWS = 8
# Most rows for `product`. With 64, rounding included, it takes 0.8 of `torch._scaled_mm`'s time in a layer of
# Llama 8B, 0.9 in one of 70B; with 128 and the best tiles for each matrix, 0.93 and 1.10.
MOST_ROWS = 64
# For a program, by the rows of its tile: outputs, depth of a step; programs wanted; warps, pipeline stages.
# One choice for all eight matrices of those layers, on average 2 to 8 % slower than the best of dozens for
# each.
_TILES = {8: (32, 128, 512, 2, 6), 32: (64, 128, 128, 4, 8), 64: (64, 128, 128, 4, 6)}
_MOST_SPLITS = 8
ROW_CLASSES = (*_TILES, MOST_ROWS + 1)  # a number of rows for each way to compute a product


@triton.jit
def store_rounded(out, scales, row, width, column, value, LARGEST: tl.constexpr):
    """Store `value` (float32), a whole row, as fp8 with its scale."""
    largest = tl.max(tl.abs(value))
    scale = tl.where(largest == 0, 1.0, largest / LARGEST)
    tl.store(scales + row, scale)
    # The quotient may exceed the type's largest number by its last bit.
    scaled = tl.minimum(tl.maximum(value / scale, -LARGEST), LARGEST)
    tl.store(out + row * width + column, scaled.to(out.dtype.element_ty), mask=column < width)


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
    block = triton.next_power_of_2(width)
    _quantize_rows[(n,)](
        out.numbers, out.scales, x, width, LARGEST=448.0, BLOCK=block, num_warps=min(16, max(1, block // 512))
    )
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


@triton.jit(do_not_specialize=["n"])
def _product(
    out, parts, arrived, x, row_scales, weight, scales, n, n_out, n_in,
    ROUNDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
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
        total = (
            tl.dot(left, right, total) if ROUNDED else tl.dot(_widened(left), right.to(tl.bfloat16), total)
        )
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
    if ROUNDED:
        total *= tl.load(row_scales + row, mask=row < n, other=0.0)[None, :]
    tl.store(out + cell, total.to(out.dtype.element_ty), mask=real)


def product(
    x: Tensor, row_scales: Tensor | None, weight: Tensor, scales: Tensor, arrived: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return x @ weight.T as `dtype`.

    x [n, in]: floats of at most `WIDENED_ROWS` rows, or fp8 with `row_scales` of at most `MOST_ROWS`; weight:
    float8_e4m3fn [out, in], both multiples of 16; scales: float32, one per output; arrived: at least out / 16
    zeros (int32), which are zeros again afterwards, for one product at a time.
    """
    n, (n_out, n_in) = len(x), weight.shape
    rows = min(size for size in _TILES if size >= n)
    columns, depth, n_programs, n_warps, n_stages = _TILES[rows]
    is_rounded = row_scales is not None
    tiles = triton.cdiv(n_out, columns)
    splits = min(
        _MOST_SPLITS, triton.next_power_of_2(triton.cdiv(n_programs, tiles)), triton.cdiv(n_in, depth)
    )
    out = x.new_empty(n, n_out, dtype=dtype)
    parts = out if splits == 1 else x.new_empty(splits, n, n_out, dtype=torch.float32)
    _product[(tiles, splits)](
        out, parts, arrived, x, row_scales if is_rounded else scales, weight, scales, n, n_out, n_in,
        ROUNDED=is_rounded, ROWS=rows, COLUMNS=columns, DEPTH=depth, SPLITS=splits,
        num_warps=n_warps, num_stages=n_stages,
    )  # fmt: skip
    return out
