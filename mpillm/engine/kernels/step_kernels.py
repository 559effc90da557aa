"""Triton kernels between the matrix products, on NVIDIA GPUs; `ops` has plain forms for the CPU.

The cache of a layer is [blocks, kv_heads, tokens_per_block, head_dim] (see `kv_cache`); in fp8 it has
`scales` [2, kv_heads], None in another dtype. `table` [slots, blocks of a sequence] (int32) names the blocks
of a sequence; a row of a step is a token, with the slot of its sequence and its position there. Attention is
computed as in FlashAttention-2 (Dao, 2023), over blocks in place as in PagedAttention (Kwon et al., 2023);
decode is split over the context as in Flash-Decoding (Dao et al., 2023): all query heads that share a KV head
are rows of one product. All sums are float32.

A kernel's compilation may depend on the number of rows only through powers of two, or the warm-up would miss
variants (see `gpu_steps`). So it must not depend on alignment, which varies with where parts of a buffer
begin.
"""

from __future__ import annotations

import math
import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpillm.engine.kernels.expert_kernels import combine as combine
from mpillm.engine.kernels.expert_kernels import route as route
from mpillm.engine.kernels.fp8_kernels import load_scaled, new_rounded, parts_of, store_rounded
from mpillm.engine.kernels.fp8_kernels import scaled as scaled
from mpillm.engine.model.ops import Rounded, Unscaled

_LOG2_E = math.log2(math.e)
ASSEMBLY = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")  # Triton's interpreter has none
_LARGEST = tl.constexpr(448.0)  # fp8 number
_LEAST_ROWS = 16  # of a tensor core's product
# Query rows of one program, over all heads that share a KV head.
_CONTEXT_ROWS = {torch.bfloat16: 128, torch.float32: 16}
# For decode, without and with an fp8 cache, measured on an H200 (docs/engine.md): warps of a program and
# pipeline stages, for a sequence with one program per KV head, and for one whose context is split.
_DECODE = {False: ((4, 3), (4, 5)), True: ((2, 2), (4, 2))}
_PROGRAMS = 512  # about as many as a large GPU runs at once: decode splits contexts to have as many
_MOST_SPLITS = 16


@triton.jit(do_not_specialize_on_alignment=["tokens", "slots"])
def _embed(out, weight, tokens, slots, last, first_row, n_rows, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    token = tl.load(tokens + row)
    if token < 0:
        token = tl.load(last + tl.load(slots + row))
    at = token - first_row
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mine = (column < width) & (at >= 0) & (at < n_rows)
    x = tl.load(weight + at * width + column, mask=mine, other=0.0)
    tl.store(out + row.to(tl.int64) * width + column, x, mask=column < width)


def embed(weight: Tensor, tokens: Tensor, slots: Tensor, last: Tensor, first: int) -> Tensor:
    """Return rows of `weight` [vocabulary, hidden] for `tokens` [n] (int64).

    Zero for tokens outside [first, first + vocabulary). Token -1 stands for the last one of its sequence,
    last[slot] (int64).
    """
    n, width = len(tokens), weight.shape[1]
    out = weight.new_empty(n, width)
    _embed[(n, triton.cdiv(width, 1024))](
        out, weight, tokens, slots, last, first, weight.shape[0], width, BLOCK=1024
    )
    return out


@triton.jit
def _add_norm(
    out, scales, x, delta, row_scales, column_scales, weight, width, eps,
    ADDS: tl.constexpr, UNSCALED: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
        # Through the model's type, so that this rounds the same values as a separate kernel would.
        store_rounded(
            out,
            scales,
            index,
            width,
            column,
            normed.to(x.dtype.element_ty).to(tl.float32),
            _LARGEST,
        )
    else:
        tl.store(out + row + column, normed.to(out.dtype.element_ty), mask=real)


def add_norm(
    x: Tensor, delta: Tensor | Unscaled | None, weight: Tensor, eps: float, rounds: bool = False
) -> Tensor | Rounded:
    """As `ops.add_norm`: x, delta [n, hidden]; with `rounds` the result is fp8 (see `Linear.rounds`)."""
    n, width = x.shape
    block = triton.next_power_of_2(width)
    adds = delta is not None
    out: Tensor | Rounded = new_rounded(n, width, x) if rounds else torch.empty_like(x)
    to, scales = (out.numbers, out.scales) if isinstance(out, Rounded) else (out, out)
    added, unscaled = parts_of(x if delta is None else delta)
    _add_norm[(n,)](
        to, scales, x, *added, weight, width, eps,
        ADDS=adds, UNSCALED=unscaled, ROUNDS=rounds, BLOCK=block, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return out


@triton.jit
def _activated(gate_up, row_scales, scales, row, width, column, UNSCALED: tl.constexpr):
    real = column < width
    gate = load_scaled(gate_up, row_scales, scales, row, 2 * width, column, real, UNSCALED)
    up = load_scaled(gate_up, row_scales, scales, row, 2 * width, width + column, real, UNSCALED)
    return (gate * tl.sigmoid(gate) * up).to(gate_up.dtype.element_ty)


@triton.jit
def _silu_mul(out, gate_up, row_scales, column_scales, width, UNSCALED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = _activated(gate_up, row_scales, column_scales, row, width, column, UNSCALED)
    tl.store(out + row * width + column, value, mask=column < width)


@triton.jit
def _silu_mul_rounded(
    out, scales, gate_up, row_scales, column_scales, width, UNSCALED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    value = _activated(gate_up, row_scales, column_scales, row, width, column, UNSCALED).to(tl.float32)
    store_rounded(out, scales, row, width, column, value, _LARGEST)


def silu_mul(gate_up: Tensor | Unscaled, rounds: bool = False) -> Tensor | Rounded:
    """As `ops.silu_mul`: gate_up [n, 2 * intermediate]; with `rounds` in fp8 (see `Linear.rounds`)."""
    parts, unscaled = parts_of(gate_up)
    n, width = len(parts.numbers), parts.numbers.shape[1] // 2
    if rounds:
        rounded, block = new_rounded(n, width, parts.numbers), triton.next_power_of_2(width)
        n_warps = min(32, max(1, block // 512))
        _silu_mul_rounded[(n,)](
            rounded.numbers, rounded.scales, *parts, width, UNSCALED=unscaled, BLOCK=block, num_warps=n_warps
        )
        return rounded
    out = parts.numbers.new_empty(n, width)
    _silu_mul[(n, triton.cdiv(width, 1024))](out, *parts, width, UNSCALED=unscaled, BLOCK=1024)
    return out


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _rotate_store(
    qkv, row_scales, column_scales, keys, values, scales, rotations, table, slots, positions, n_per_slot,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr, UNSCALED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    position = tl.load(positions + row)
    block = tl.load(table + tl.load(slots + row) * n_per_slot + position // SIZE).to(tl.int64)
    real = (head < H + 2 * K) & (column < D)
    at = head * D + column
    width = (H + 2 * K) * D
    x = load_scaled(qkv, row_scales, column_scales, row, width, at, real, UNSCALED)
    # The other value of the pair.
    is_turned = real & (head < H + K)
    other = load_scaled(
        qkv, row_scales, column_scales, row, width, head * D + (column ^ 1), is_turned, UNSCALED
    )
    turn = rotations + position * D + (column // 2) * 2
    cosine, sine = tl.load(turn, mask=column < D, other=0.0), tl.load(turn + 1, mask=column < D, other=0.0)
    turned = (x * cosine + tl.where(column % 2 == 0, -other, other) * sine).to(qkv.dtype.element_ty)
    tl.debug_barrier()  # another thread than the writer has read `other`
    tl.store(qkv + row * width + at, turned, mask=real & (head < H))
    cell = ((block * K + (head - H) % K) * SIZE + position % SIZE) * D + column
    held = tl.where(head < H + K, turned, x.to(qkv.dtype.element_ty))
    if SCALED:
        held = held.to(tl.float32) / tl.load(
            scales + head - H, mask=(head >= H) & (head < H + 2 * K), other=1.0
        )
        held = tl.minimum(tl.maximum(held, -_LARGEST), _LARGEST)
    held = held.to(keys.dtype.element_ty)
    tl.store(keys + cell, held, mask=real & (head >= H) & (head < H + K))
    tl.store(values + cell, held, mask=real & (head >= H + K))


def rotate_store(
    qkv: Tensor | Unscaled,
    keys: Tensor,
    values: Tensor,
    scales: Tensor | None,
    rotations: Tensor,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    n_heads: int,
) -> Tensor:
    """Rotate queries in place; store rotated keys, and values, in the cache.

    qkv [n, heads + 2 * kv_heads, head_dim]; keys, values, scales: a layer's cache; rotations [positions,
    head_dim] (float32): cosine and sine of each pair; slots, positions [n] (int64). Returns qkv, of which
    only the queries count.
    """
    parts, unscaled = parts_of(qkv)
    n, all_heads, d = parts.numbers.shape
    k, size = keys.shape[1:3]
    heads = 8
    _rotate_store[(n, triton.cdiv(all_heads, heads))](
        *parts, keys, values, rotations if scales is None else scales, rotations, table, slots, positions,
        table.stride(0), H=n_heads, K=k, D=d, SIZE=size, HEADS=heads, BLOCK_D=triton.next_power_of_2(d),
        UNSCALED=unscaled, SCALED=scales is not None, num_warps=4,
    )  # fmt: skip
    return parts.numbers


@triton.jit
def _operand(q):
    """Return queries for products with fp8 keys: bfloat16 as float16, the only type to which GPUs widen fp8.

    float16 holds fp8 keys and values exactly. A query loses what is smaller than 2^-24, and is clipped at
    65,504.
    """
    if q.dtype == tl.bfloat16:
        q = tl.minimum(tl.maximum(q.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    return q


@triton.jit
def _low(both):
    """Return the first of each pair of fp8 numbers (int16), over 256, as float16: bits moved into place."""
    if ASSEMBLY:  # two pairs at a time
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c;
            shl.b32 a, $1, 8;
            and.b32 b, a, 0x80008000;
            shr.u32 c, a, 1;
            lop3.b32 $0, c, 0x3F803F80, b, 0xEA;
            }""",
            "=r,r", [both], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    both = both.to(tl.int32)
    return (((both & 0x80) << 8) | ((both & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _high(both):
    """As `_low`, for the second ones."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            and.b32 a, $1, 0x80008000;
            shr.u32 b, $1, 1;
            lop3.b32 $0, b, 0x3F803F80, a, 0xEA;
            }""",
            "=r,r", [both], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    both = both.to(tl.int32)
    return ((both & 0x8000) | ((both >> 1) & 0x3F80)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _attend(
    q, first, last, limit, block_row, keys, values, head, scale,
    K: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    TILE: tl.constexpr, PAIRED: tl.constexpr = False,
):  # fmt: skip
    """Attend to tokens [first, last) of a sequence, in each row up to position `limit`.

    The cache's content is widened to q's type. PAIRED: `values` are pairs of fp8 numbers, as int16: tensor
    cores want values of consecutive tokens side by side, which is possible only 16 bits at a time. Returns
    weighted values [ROWS, BLOCK_D], and for each row the sum of the weights and their offset (log2).
    """
    d, pair = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D // 2)
    best = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if PAIRED:
        even = tl.zeros([ROWS, BLOCK_D // 2], tl.float32)
        odd = tl.zeros([ROWS, BLOCK_D // 2], tl.float32)
    else:
        out = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in range(first, last, TILE):
        token = start + tl.arange(0, TILE)
        real = token < last
        block = tl.load(block_row + token // SIZE, mask=real, other=0).to(tl.int64)
        cell = ((block * K + head) * SIZE + token % SIZE) * D
        key = tl.load(keys + cell[:, None] + d[None, :], mask=real[:, None] & (d[None, :] < D), other=0.0)
        score = tl.dot(q, tl.trans(key.to(q.dtype)), input_precision="ieee") * scale
        score = tl.where(real[None, :] & (token[None, :] <= limit[:, None]), score, -float("inf"))
        highest = tl.maximum(best, tl.max(score, 1))
        base = tl.where(highest == -float("inf"), 0.0, highest)
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(best - base)
        total = total * shrink + tl.sum(weight, 1)
        weight = weight.to(q.dtype)
        if PAIRED:
            both = tl.load(
                values + (cell // 2)[:, None] + pair[None, :],
                mask=real[:, None] & (pair[None, :] < D // 2),
                other=0,
            )
            even = tl.dot(weight, _low(both).to(q.dtype), even * shrink[:, None], input_precision="ieee")
            odd = tl.dot(weight, _high(both).to(q.dtype), odd * shrink[:, None], input_precision="ieee")
        else:
            value = tl.load(
                values + cell[:, None] + d[None, :], mask=real[:, None] & (d[None, :] < D), other=0.0
            )
            out = tl.dot(weight, value.to(q.dtype), out * shrink[:, None], input_precision="ieee")
        best = highest
    if PAIRED:
        out = tl.interleave(even, odd) * 256.0
    return out, total, best


@triton.jit(do_not_specialize_on_alignment=["slots", "positions", "sums", "bests"])
def _decode(
    qkv, keys, values, scales, table, slots, positions, out, parts, sums, bests, n_per_slot, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    head, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    G: tl.constexpr = H // K
    member, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    position = tl.load(positions + row).to(tl.int32)
    share = tl.cdiv(tl.cdiv(position + 1, TILE), SPLITS) * TILE
    first = split * share
    query = head * G + member
    real = (member < G)[:, None] & (d < D)[None, :]
    q = tl.load(qkv + (row * (H + 2 * K) + query[:, None]) * D + d[None, :], mask=real, other=0.0)
    value_scale = 1.0
    if SCALED:
        q = _operand(q)
        scale *= tl.load(scales + head)
        value_scale = tl.load(scales + K + head)
    limit = tl.full([ROWS], 0, tl.int32) + position
    block_row = table + tl.load(slots + row) * n_per_slot
    last = tl.minimum(first + share, position + 1)
    result, total, best = _attend(
        q, first, last, limit, block_row, keys, values, head, scale, K, D, SIZE, ROWS, BLOCK_D, TILE, SCALED
    )
    result *= value_scale
    at = row * H + query
    if SPLITS == 1:
        tl.store(
            out + at[:, None] * D + d[None, :], (result / total[:, None]).to(out.dtype.element_ty), mask=real
        )
    else:
        at = at * SPLITS + split
        tl.store(parts + at[:, None] * D + d[None, :], result, mask=real)
        tl.store(sums + at, total, mask=member < G)
        tl.store(bests + at, best, mask=member < G)


@triton.jit(do_not_specialize_on_alignment=["sums", "bests"])
def _join(
    out,
    parts,
    sums,
    bests,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    split, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    best = tl.load(bests + at * SPLITS + split, mask=split < SPLITS, other=-float("inf"))
    weight = tl.exp2(best - tl.max(best))
    total = tl.sum(weight * tl.load(sums + at * SPLITS + split, mask=split < SPLITS, other=0.0))
    part = tl.load(
        parts + (at * SPLITS + split[:, None]) * D + d[None, :],
        mask=(split < SPLITS)[:, None] & (d < D)[None, :],
        other=0.0,
    )
    tl.store(
        out + at * D + d, (tl.sum(part * weight[:, None], 0) / total).to(out.dtype.element_ty), mask=d < D
    )


def decode_attention(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: Tensor | None,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    out: Tensor,
    n_heads: int,
) -> None:
    """Attend with one new token per row: out [n, heads * head_dim]; other arguments as `rotate_store`'s."""
    n, _, d = qkv.shape
    k, size = keys.shape[1:3]
    if scales is not None:
        values = values.view(torch.int16)
    splits = min(_MOST_SPLITS, max(1, triton.next_power_of_2(triton.cdiv(_PROGRAMS, n * k))))
    n_warps, n_stages = _DECODE[scales is not None][splits > 1]
    rows, block_d = max(_LEAST_ROWS, triton.next_power_of_2(n_heads // k)), max(16, triton.next_power_of_2(d))
    parts = out if splits == 1 else qkv.new_empty(n, n_heads, splits, d, dtype=torch.float32)
    sums, bests = (out, out) if splits == 1 else qkv.new_empty(2, n, n_heads, splits, dtype=torch.float32)
    _decode[(k, n, splits)](
        qkv, keys, values, out if scales is None else scales, table, slots, positions, out, parts, sums,
        bests, table.stride(0), _LOG2_E / math.sqrt(d),
        H=n_heads, K=k, D=d, SIZE=size, ROWS=rows, BLOCK_D=block_d, TILE=64, SPLITS=splits,
        SCALED=scales is not None, num_warps=n_warps, num_stages=n_stages,
    )  # fmt: skip
    if splits > 1:
        _join[(n * n_heads,)](out, parts, sums, bests, D=d, BLOCK_D=block_d, SPLITS=splits, BLOCK_S=splits)


@triton.jit(do_not_specialize_on_alignment=["tiles"])
def _context(
    qkv, keys, values, scales, table, tiles, out, n_per_slot, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr, TILE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    head, tile = tl.program_id(0), tiles + tl.program_id(1) * 4
    G: tl.constexpr = H // K
    row, slot = tl.load(tile), tl.load(tile + 3)
    n, position = tl.load(tile + 1).to(tl.int32), tl.load(tile + 2).to(tl.int32)
    member, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    query, token = head * G + member % G, member // G
    real = (token < n)[:, None] & (d < D)[None, :]
    q = tl.load(qkv + ((row + token) * (H + 2 * K) + query)[:, None] * D + d[None, :], mask=real, other=0.0)
    value_scale = 1.0
    if SCALED:
        q = _operand(q)
        scale *= tl.load(scales + head)
        value_scale = tl.load(scales + K + head)
    block_row = table + slot * n_per_slot
    # Padding rows attend to something, or they would divide by zero.
    limit = position + tl.minimum(token, n - 1)
    result, total, _ = _attend(
        q, 0, position + n, limit, block_row, keys, values, head, scale, K, D, SIZE, ROWS, BLOCK_D, TILE
    )
    at = ((row + token) * H + query)[:, None] * D + d[None, :]
    tl.store(out + at, (result * value_scale / total[:, None]).to(out.dtype.element_ty), mask=real)


def context_tile(n_heads: int, n_kv_heads: int, dtype: torch.dtype) -> int:
    """Return the query tokens of one program of `context_attention`."""
    return max(1, _CONTEXT_ROWS[dtype] // (n_heads // n_kv_heads))


def context_attention(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: Tensor | None,
    table: Tensor,
    tiles: Tensor,
    out: Tensor,
    n_heads: int,
) -> None:
    """Attend with several new tokens per sequence, causally, to them and to everything before.

    tiles [m, 4] (int64): first row, rows (at most `context_tile`), position of the first, slot. The rest as
    in `decode_attention`.
    """
    d = qkv.shape[2]
    k, size = keys.shape[1:3]
    group = n_heads // k
    rows = max(_LEAST_ROWS, triton.next_power_of_2(context_tile(n_heads, k, qkv.dtype) * group))
    _context[(k, len(tiles))](
        qkv, keys, values, out if scales is None else scales, table, tiles, out, table.stride(0),
        _LOG2_E / math.sqrt(d), H=n_heads, K=k, D=d, SIZE=size, ROWS=rows,
        BLOCK_D=max(16, triton.next_power_of_2(d)), TILE=64 if qkv.dtype == torch.bfloat16 else 32,
        SCALED=scales is not None, num_warps=8, num_stages=2,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n_blocks", "first_head", "n"])
def _copy_blocks(
    keys,
    values,
    table,
    n,
    n_blocks,
    first_head,
    n_heads,
    N_PIECE_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    INTO_PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i, part = tl.program_id(0), tl.program_id(1)
    block, first = tl.load(table + i), tl.load(table + n + i)
    n_tokens, address = tl.load(table + 2 * n + i), tl.load(table + 3 * n + i)
    layer, head = (part // N_PIECE_HEADS).to(tl.int64), part % N_PIECE_HEADS
    held = ((layer * n_blocks + block) * n_heads + first_head + head) * (SIZE * DIM)
    # A key's; values come after all keys of the layer.
    piece = address.to(keys.dtype) + ((2 * layer * N_PIECE_HEADS + head) * n_tokens + first) * DIM
    value = N_PIECE_HEADS * n_tokens * DIM
    end = tl.minimum(n_tokens - first, SIZE) * DIM
    for start in range(0, SIZE * DIM, BLOCK):
        at = start + tl.arange(0, BLOCK)
        real = at < end
        key_there, value_there = tl.multiple_of(piece + at, 16), tl.multiple_of(piece + value + at, 16)
        if INTO_PIECES:
            tl.store(key_there, tl.load(keys + held + at, mask=real), mask=real)
            tl.store(value_there, tl.load(values + held + at, mask=real), mask=real)
        else:
            tl.store(keys + held + at, tl.load(key_there, mask=real), mask=real)
            tl.store(values + held + at, tl.load(value_there, mask=real), mask=real)


def copy_blocks(
    keys: Tensor, values: Tensor, table: Tensor, first_head: int, n_heads: int, into_pieces: bool
) -> None:
    """Copy blocks of the cache into pieces of several handoffs, or back.

    keys, values: [layers, blocks, kv_heads, tokens_per_block, head_dim]. A piece is contiguous, [layers, 2,
    heads, tokens, head_dim]; its heads are `n_heads` of the cache's from `first_head` on. `table` (int64
    [4, n]) has for each block its number, the index of its first token, the piece's tokens and its address.
    """
    n_layers, n_blocks, n_held, size, dim = keys.shape
    block, n = min(2048, triton.next_power_of_2(size * dim)), table.shape[1]
    _copy_blocks[(n, n_layers * n_heads)](
        keys, values, table, n, n_blocks, first_head, n_held, n_heads, size, dim, into_pieces, block
    )
