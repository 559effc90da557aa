"""Triton kernels between the matrix products, on NVIDIA GPUs; `ops` has the same in plain PyTorch.

The cache of a layer is [blocks, kv_heads, tokens_per_block, head_dim] (see `kv_cache`); in fp8 it has
`scales` [2, kv_heads], None in another dtype. `table` [slots, blocks of a sequence] (int32) has the block
numbers of each slot's sequence. A row of a step is a token, with the slot of its sequence and its position in
the sequence. All sums are float32.

A kernel's compilation may depend on the number of rows only through powers of two; otherwise the warm-up
misses variants (see `gpu_steps`). The compilation must not depend on alignment, because alignment varies with
where a part of a buffer starts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpillm.engine.kernels.attention_kernels import decode_attention as decode_attention
from mpillm.engine.kernels.context_kernels import context_attention as context_attention
from mpillm.engine.kernels.context_kernels import context_tile as context_tile
from mpillm.engine.kernels.context_kernels import copied_rows as copied_rows
from mpillm.engine.kernels.early_starts import after_previous, let_next_start, starts_early
from mpillm.engine.kernels.expert_kernels import combine as combine
from mpillm.engine.kernels.expert_kernels import route as route
from mpillm.engine.kernels.expert_kernels import route_grouped as route_grouped
from mpillm.engine.kernels.fp8_contexts import fp8_context_attention as fp8_context_attention
from mpillm.engine.kernels.fp8_kernels import load_scaled, nearest_fp8, new_rounded, parts_of, store_rounded
from mpillm.engine.kernels.fp8_kernels import scaled as scaled
from mpillm.engine.kernels.launch import Kernel, cdiv, next_power_of_2
from mpillm.engine.kernels.ops import Partial, RoundedRows, UnscaledProduct
from mpillm.engine.kernels.sum_kernels import sum_add_norm
from mpillm.engine.shape.composition import CLAMP, SWISH, Activation

_LARGEST = tl.constexpr(448.0)  # largest fp8 number
_CLAMP, _SWISH = tl.constexpr(CLAMP), tl.constexpr(SWISH)


@Kernel
@triton.jit(do_not_specialize_on_alignment=["tokens", "slots"])
def _embed(out, weight, tokens, slots, last, first_row, n_rows, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    token = tl.load(tokens + row)
    if token < 0:
        token = tl.load(last + tl.load(slots + row))
    at = token - first_row
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_own = (column < width) & (at >= 0) & (at < n_rows)
    x = tl.load(weight + at * width + column, mask=is_own, other=0.0)
    tl.store(out + row.to(tl.int64) * width + column, x, mask=column < width)


def embed(weight: Tensor, tokens: Tensor, slots: Tensor, last: Tensor, first: int) -> Tensor:
    """Return rows of `weight` [vocabulary, hidden] for `tokens` [n] (int64).

    Rows are zero for tokens outside [first, first + vocabulary). Token -1 stands for the last token of its
    sequence, last[slot] (int64).
    """
    n, width = len(tokens), weight.shape[1]
    out = weight.new_empty(n, width)
    _embed[(n, cdiv(width, 1024))](
        out, weight, tokens, slots, last, first, weight.shape[0], width, BLOCK=1024
    )
    return out


@Kernel
@triton.jit
def _add_norm(
    out, scales, x, delta, row_scales, column_scales, weight, width, eps,
    ADDS: tl.constexpr, UNSCALED: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    let_next_start(EARLY)
    index = tl.program_id(0).to(tl.int64)
    row = index * width
    column = tl.arange(0, BLOCK)
    real = column < width
    value = tl.load(x + row + column, mask=real, other=0.0)
    if ADDS:
        added = load_scaled(delta, row_scales, column_scales, index, width, column, real, UNSCALED)
        value = (value.to(tl.float32) + added).to(x.dtype.element_ty)
        tl.store(x + row + column, value, mask=real)
    value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / width + eps)
    normed = value * scale * tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    if ROUNDS:
        # Through the model's dtype, to round the same values as a separate kernel.
        store_rounded(
            out, scales, index, width, column, normed.to(x.dtype.element_ty).to(tl.float32), _LARGEST
        )
    else:
        tl.store(out + row + column, normed.to(out.dtype.element_ty), mask=real)


def add_norm(
    x: Tensor,
    delta: Tensor | UnscaledProduct | Partial | None,
    weight: Tensor,
    eps: float,
    rounds: bool = False,
) -> Tensor | RoundedRows:
    """Compute `ops.add_norm`: x, delta [n, hidden]; with `rounds` the result is fp8 (see `Linear.rounds`)."""
    if isinstance(delta, Partial):
        return sum_add_norm(delta.shared, x, delta.product, weight, eps, rounds)
    n, width = x.shape
    block = next_power_of_2(width)
    adds = delta is not None
    out: Tensor | RoundedRows = new_rounded(n, width, x) if rounds else torch.empty_like(x)
    to, scales = (out.numbers, out.scales) if isinstance(out, RoundedRows) else (out, out)
    added, unscaled = parts_of(x if delta is None else delta)
    _add_norm[(n,)](
        to, scales, x, *added, weight, width, eps,
        ADDS=adds, UNSCALED=unscaled, ROUNDS=rounds, BLOCK=block, EARLY=starts_early(x),
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return out


@triton.jit
def _activated(gate_up, row_scales, scales, row, width, column, UNSCALED: tl.constexpr, KIND: tl.constexpr):
    real = column < width
    gate = load_scaled(gate_up, row_scales, scales, row, 2 * width, column, real, UNSCALED)
    up = load_scaled(gate_up, row_scales, scales, row, 2 * width, width + column, real, UNSCALED)
    if KIND == "gelu_tanh":  # (1 + tanh(x)) / 2 is the sigmoid of 2 x
        value = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    elif KIND == "clamped_swiglu":
        gate, up = tl.minimum(gate, _CLAMP), tl.minimum(tl.maximum(up, -_CLAMP), _CLAMP)
        value = gate * tl.sigmoid(gate * _SWISH) * (up + 1.0)
    else:
        value = gate * tl.sigmoid(gate) * up
    return value.to(gate_up.dtype.element_ty)


@Kernel
@triton.jit
def _gated(
    out, gate_up, row_scales, column_scales, width,
    UNSCALED: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = _activated(gate_up, row_scales, column_scales, row, width, column, UNSCALED, KIND)
    tl.store(out + row * width + column, value, mask=column < width)


@Kernel
@triton.jit
def _gated_rounded(
    out, scales, gate_up, row_scales, column_scales, width,
    UNSCALED: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    value = _activated(gate_up, row_scales, column_scales, row, width, column, UNSCALED, KIND).to(tl.float32)
    store_rounded(out, scales, row, width, column, value, _LARGEST)


def gated(
    gate_up: Tensor | UnscaledProduct, rounds: bool = False, activation: Activation = "silu"
) -> Tensor | RoundedRows:
    """Compute `ops.gated`: gate_up [n, 2 * intermediate]; with `rounds` in fp8 (see `Linear.rounds`)."""
    parts, unscaled = parts_of(gate_up)
    n, width = len(parts.numbers), parts.numbers.shape[1] // 2
    if rounds:
        rounded, block = new_rounded(n, width, parts.numbers), next_power_of_2(width)
        n_warps = min(32, max(1, block // 512))
        _gated_rounded[(n,)](
            rounded.numbers, rounded.scales, *parts, width,
            UNSCALED=unscaled, KIND=activation, BLOCK=block, num_warps=n_warps,
        )  # fmt: skip
        return rounded
    out = parts.numbers.new_empty(n, width)
    _gated[(n, cdiv(width, 1024))](out, *parts, width, UNSCALED=unscaled, KIND=activation, BLOCK=1024)
    return out


@Kernel
@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _rotate_store(
    out, qkv, row_scales, column_scales, keys, values, scales, rotations, table, slots, positions, n_per_slot,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr, UNSCALED: tl.constexpr, SCALED: tl.constexpr, PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    let_next_start(EARLY)
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    column, pair = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_D // 2)[None, :]
    position = tl.load(positions + row)
    block = tl.load(table + tl.load(slots + row) * n_per_slot + position // SIZE).to(tl.int64)
    real = (head < H + 2 * K) & (column < D)
    at, width = head * D + column, (H + 2 * K) * D
    x = load_scaled(qkv, row_scales, column_scales, row, width, at, real, UNSCALED)
    even, odd = tl.split(tl.reshape(x, [HEADS, BLOCK_D // 2, 2]))
    turn = rotations + position * D + 2 * pair
    cosine, sine = (
        tl.load(turn, mask=2 * pair < D, other=0.0), tl.load(turn + 1, mask=2 * pair < D, other=0.0)
    )  # fmt: skip
    turned = tl.join(even * cosine - odd * sine, odd * cosine + even * sine)
    x = tl.where(head < H + K, tl.reshape(turned, [HEADS, BLOCK_D]), x)
    x = x.to(qkv.dtype.element_ty)
    cached = x
    if SCALED:
        cached = cached.to(tl.float32) / tl.load(
            scales + head - H, mask=(head >= H) & (head < H + 2 * K), other=1.0
        )
        cached = nearest_fp8(tl.minimum(tl.maximum(cached, -_LARGEST), _LARGEST))
    stored = cached.to(keys.dtype.element_ty)
    if not SCALED:
        cached = stored
    tl.store(out + row * width + at, tl.where(head < H, x, cached.to(x.dtype)), mask=real)
    cell = ((block * K + (head - H) % K) * SIZE + position % SIZE) * D + column
    tl.store(keys + cell, stored, mask=real & (head >= H) & (head < H + K))
    if PARTS == 2:
        tl.store(values + cell, stored, mask=real & (head >= H + K))


def rotate_store(
    qkv: Tensor | UnscaledProduct,
    keys: Tensor,
    values: Tensor,
    scales: Tensor | None,
    rotations: Tensor,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    n_heads: int,
    out: Tensor | None = None,
) -> Tensor:
    """Rotate queries and keys; store keys and values in the cache.

    Keys and values in `out` equal the cache's numbers, without scales, so attention may read them from `out`
    or the cache.

    Args:
        qkv: [n, heads + 2 * kv_heads, head_dim].
        keys: With `values` and `scales`, a layer's cache (see `KVCache`).
        rotations: float32 [positions, head_dim], cosine and sine of each pair.
        slots: int64 [n], as are `positions`.
        out: Has qkv's shape; by default qkv is overwritten.

    Returns:
        `out`.
    """
    parts, unscaled = parts_of(qkv)
    out = parts.numbers if out is None else out
    n, all_heads, d = parts.numbers.shape
    k, size = keys.shape[1:3]
    heads = 8
    _rotate_store[(n, cdiv(all_heads, heads))](
        out, *parts, keys, values, rotations if scales is None else scales, rotations, table, slots,
        positions, table.stride(0), H=n_heads, K=k, D=d, SIZE=size, HEADS=heads, BLOCK_D=next_power_of_2(d),
        UNSCALED=unscaled, SCALED=scales is not None, PARTS=1 if values.data_ptr() == keys.data_ptr() else 2,
        EARLY=starts_early(slots), num_warps=4,
    )  # fmt: skip
    return out
