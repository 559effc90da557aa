"""Attention of long contexts with products in fp8: queries, keys, the softmax's weights, and values.

Queries are rounded with a scale for each row. The softmax's weights are multiplied by 256 and rounded. Keys
and values keep the cache's numbers. Tensor cores need values of consecutive tokens side by side, so values
are copied out of the blocks transposed.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mpillm.engine.kernels.attention_kernels import LOG2_E
from mpillm.engine.kernels.launch import Kernel, cdiv
from mpillm.engine.shape.memory import PADDED

_LARGEST = tl.constexpr(448.0)  # largest fp8 number
_LOWEST = tl.constexpr(-1.0e30)
_BITS = tl.constexpr(8.0)  # a weight is multiplied by 2^8: the smallest fp8 number above zero is 2^-9
# As in `context_kernels`, measured on an H200.
_ROWS, _TILE, _WARPS, _STAGES = 128, 64, 4, 3


@Kernel
@triton.jit(do_not_specialize_on_alignment=["copies"])
def _copy(
    out_keys, out_values, keys, values, table, copies, n_per_slot, n_rows,
    K: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head, start, copy = tl.program_id(0), tl.program_id(1) * TILE, copies + tl.program_id(2) * 3
    slot, n, first = tl.load(copy), tl.load(copy + 1).to(tl.int32), tl.load(copy + 2)
    if start >= n:
        return
    token, d = start + tl.arange(0, TILE), tl.arange(0, D)
    is_token = token < n
    block = tl.load(table + slot * n_per_slot + token // SIZE, mask=is_token, other=0).to(tl.int64)
    cell = (((block * K + head) * SIZE + token % SIZE) * D)[:, None] + d[None, :]
    # Padding must be zero: uninitialized memory may contain NaN, and zero times NaN is NaN.
    key = tl.load(keys + cell, mask=is_token[:, None], other=0)
    value = tl.load(values + cell, mask=is_token[:, None], other=0)
    row = first + token
    tl.store(out_keys + (head.to(tl.int64) * n_rows + row)[:, None] * D + d[None, :], key)
    tl.store(out_values + (head.to(tl.int64) * D + d[:, None]) * n_rows + row[None, :], tl.trans(value))


@triton.jit
def _take_in(best, total, result, q, factor, keys, values, key_at, value_at, seen, MASKED: tl.constexpr):
    """Compute `context_kernels._take_in` from tensor descriptors and the tile's place in them."""
    score = tl.dot(q, tl.trans(keys.load(key_at)))
    if MASKED:
        score = tl.where(seen, score, -float("inf"))
    highest = tl.maximum(best, tl.max(score, 1) * factor)
    weight = tl.exp2(score * factor[:, None] - (highest - _BITS)[:, None])
    shrink = tl.exp2(best - highest)
    total = total * shrink + tl.sum(weight, 1)
    value = tl.trans(values.load(value_at))
    return highest, total, tl.dot(weight.to(tl.float8e4nv), value, result * shrink[:, None])


# Not a `Kernel`, which does not support descriptors. A long context hides Triton's slower launch.
@triton.jit(do_not_specialize_on_alignment=["tiles"])
def _context(
    qkv, keys, values, scales, tiles, out, n_rows, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head, tile = tl.program_id(0), tiles + tl.program_id(1) * 6
    G: tl.constexpr = H // K
    row, n, position = tl.load(tile), tl.load(tile + 1).to(tl.int32), tl.load(tile + 2).to(tl.int32)
    first = tl.load(tile + 5).to(tl.int32)
    member, d, step = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, TILE)
    query, token = head * G + member % G, member // G
    real = (token < n)[:, None]
    q_at = (((row + token) * (H + 2 * K) + query) * D)[:, None] + d[None, :]
    q = tl.load(qkv + q_at, mask=real, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(q), 1), 1.0e-20)
    q = (q * (_LARGEST / largest)[:, None]).to(tl.float8e4nv)
    factor = largest * (scale / _LARGEST) * tl.load(scales + head)
    best = tl.full([ROWS], _LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, D], tl.float32)
    n_full = (position + 1) // TILE * TILE  # which every query sees
    for start in range(0, n_full, TILE):
        best, total, result = _take_in(
            best, total, result, q, factor, keys, values,
            [head * n_rows + first + start, 0], [head * D, first + start], real, False,
        )  # fmt: skip
    last = position + tl.minimum(token, n - 1)
    for start in range(n_full, position + n, TILE):
        best, total, result = _take_in(
            best, total, result, q, factor, keys, values,
            [head * n_rows + first + start, 0], [head * D, first + start],
            (start + step)[None, :] <= last[:, None], True,
        )  # fmt: skip
    result *= tl.load(scales + K + head)
    at = ((row + token) * H + query)[:, None] * D + d[None, :]
    tl.store(out + at, (result / total[:, None]).to(out.dtype.element_ty), mask=real)


def fp8_context_attention(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: Tensor,
    table: Tensor,
    copies: Tensor,
    n_rows: int,
    longest: int,
    tiles: Tensor,
    out: Tensor,
    n_heads: int,
) -> None:
    """Compute `context_attention` with `copied_rows`, for heads of 64 or 128 values and an fp8 cache.

    Each sequence's rows begin and end at a multiple of `PADDED`.
    """
    k, size, d = keys.shape[1:]
    copied_keys, copied_values = keys.new_empty(k * n_rows, d), keys.new_empty(k * d, n_rows)
    _copy[(k, cdiv(longest, PADDED), len(copies))](
        *(x.view(torch.uint8) for x in (copied_keys, copied_values, keys, values)),
        table, copies, table.stride(0), n_rows, K=k, D=d, SIZE=size, TILE=PADDED, num_warps=4,
    )  # fmt: skip
    _context[(k, len(tiles))](
        qkv,
        TensorDescriptor.from_tensor(copied_keys, [_TILE, d]),
        TensorDescriptor.from_tensor(copied_values, [d, _TILE]),
        scales, tiles, out, n_rows, LOG2_E.value / math.sqrt(d),
        H=n_heads, K=k, D=d, ROWS=_ROWS, TILE=_TILE, num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
