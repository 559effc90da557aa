"""Triton kernels for attention of contexts (several new tokens of a sequence): see `attention_kernels`."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpillm.engine.kernels.attention_kernels import LOG2_E, groups_of, operand
from mpillm.engine.kernels.launch import Kernel, cdiv, next_power_of_2

# Below all scores, but finite: a row that sees no token of a tile must not compute inf - inf.
_LOWEST = tl.constexpr(-1.0e30)
# Measured on an H200: query rows of a program (over all heads that share a KV head), keys that it reads at a
# time, its warps, and pipeline stages.
_CONTEXT = {torch.bfloat16: (128, 64, 8, 3), torch.float32: (16, 32, 8, 2)}
# The same with a latent. With an fp8 cache, queries are in shared memory twice.
_LATENT = {torch.bfloat16: (64, 32, 8, 3), torch.float32: (16, 32, 8, 1)}
_LATENT_SCALED = {torch.bfloat16: (32, 32, 8, 2), torch.float32: (16, 32, 8, 1)}


@triton.jit
def _take_in(best, total, result, q, key, value, score, seen, scale, MASKED: tl.constexpr):
    """Add a tile of keys and values to the running softmax; `seen` marks the tokens that each row sees.

    `score`: see `_rope_scores`. Returns the largest score (log2), the sum of the weights relative to it,
    and the weighted values.
    """
    score = tl.dot(q, tl.trans(key), score, input_precision="ieee")
    if MASKED:
        score = tl.where(seen, score, -float("inf"))
    highest = tl.maximum(best, tl.max(score, 1) * scale)
    weight = tl.exp2(score * scale - highest[:, None])
    shrink = tl.exp2(best - highest)
    total = total * shrink + tl.sum(weight, 1)
    return highest, total, tl.dot(weight.to(q.dtype), value, result * shrink[:, None], input_precision="ieee")


@triton.jit
def _rope_scores(
    q, keys, real,
    D: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return a tile's scores from the values behind each key's first RANK values; zero without a RANK.

    q [ROWS, BLOCK_R]; keys [TILE, 1] (pointers); real [TILE].
    """
    score = tl.zeros([ROWS, TILE], tl.float32)
    if RANK > 0:
        r = tl.arange(0, BLOCK_R)
        rope_key = tl.load(keys + RANK + r[None, :], mask=real[:, None] & (r < D - RANK)[None, :], other=0.0)
        score = tl.dot(q, tl.trans(rope_key.to(q.dtype)), score, input_precision="ieee")
    return score


@Kernel
@triton.jit(do_not_specialize_on_alignment=["copies"])
def _copy(
    rows, keys, values, table, copies, n_per_slot,
    K: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head, copy = tl.program_id(0), copies + tl.program_id(2) * 3
    slot, n, first = tl.load(copy), tl.load(copy + 1).to(tl.int32), tl.load(copy + 2)
    token, d = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, BLOCK_D)
    is_token = token < n
    block = tl.load(table + slot * n_per_slot + token // SIZE, mask=is_token, other=0).to(tl.int64)
    cell = (((block * K + head) * SIZE + token % SIZE) * D)[:, None] + d[None, :]
    row = rows + (((first + token) * 2 * K + head) * D)[:, None] + d[None, :]
    inside = is_token[:, None] & (d < D)[None, :]
    key = tl.load(keys + cell, mask=inside, other=0.0)
    tl.store(row, key.to(tl.float32).to(rows.dtype.element_ty), mask=inside)
    value = tl.load(values + cell, mask=inside, other=0.0)
    tl.store(row + K * D, value.to(tl.float32).to(rows.dtype.element_ty), mask=inside)


def copied_rows(
    keys: Tensor, values: Tensor, table: Tensor, copies: Tensor, n_rows: int, longest: int, dtype: torch.dtype
) -> Tensor:
    """Copy keys and values of whole sequences out of their blocks: [n_rows, 2 * kv_heads, head_dim].

    The rows contain the cache's numbers, without its scales. copies [m, 3] (int64): slot, number of tokens
    (at most `longest`), and row of the first token. `n_rows` counts the rows of all sequences.
    """
    k, size, d = keys.shape[1:]
    rows, tile = keys.new_empty(n_rows, 2 * k, d, dtype=dtype), 32
    _copy[(k, cdiv(longest, tile), len(copies))](
        rows, keys, values, table, copies, table.stride(0),
        K=k, D=d, SIZE=size, BLOCK_D=next_power_of_2(d), TILE=tile, num_warps=4,
    )  # fmt: skip
    return rows


@Kernel
@triton.jit(do_not_specialize_on_alignment=["tiles"])
def _context(
    qkv, own_rows, keys, values, scales, table, tiles, out, sinks, n_per_slot, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr, TILE: tl.constexpr, HEADS: tl.constexpr, FIRST: tl.constexpr,
    CACHED: tl.constexpr, SCALED: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    RANK: tl.constexpr, BLOCK_R: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    head, tile = tl.program_id(0) // GROUPS, tiles + tl.program_id(1) * 6
    G: tl.constexpr = H // K // GROUPS  # queries of a group
    E: tl.constexpr = RANK if RANK > 0 else D  # values of a token
    OWN_VALUES: tl.constexpr = SCALED if RANK > 0 else True  # False: a value is its key's first values
    W: tl.constexpr = HEADS * D
    row, slot, position = tl.load(tile), tl.load(tile + 3), tl.load(tile + 2).to(tl.int32)
    n, n_cached = tl.load(tile + 1).to(tl.int32), tl.load(tile + 4).to(tl.int32)
    member, d, step = tl.arange(0, ROWS), tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    query, token = tl.program_id(0) * G + member % G, member // G
    real = (token < n)[:, None] & (d < E)[None, :]
    q_at = qkv + (((row + token) * (H + 2 * K) + query) * D)[:, None]
    q = tl.load(q_at + d[None, :], mask=real, other=0.0)
    q_rope = q
    if RANK > 0:
        r = tl.arange(0, BLOCK_R)
        q_rope = tl.load(
            q_at + RANK + r[None, :], mask=(token < n)[:, None] & (r < D - RANK)[None, :], other=0.0
        )
    best = tl.full([ROWS], _LOWEST if WINDOW > 0 else -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, BLOCK_D], tl.float32)
    value_scale = 1.0
    begin = 0  # of the tokens that any query sees
    if WINDOW > 0:
        begin = tl.maximum(position + 1 - WINDOW, 0)
    if SCALED:
        scale *= tl.load(scales + head)
        value_scale = tl.load(scales + K + head)
    if CACHED:  # tokens that are in blocks only
        wide_q, wide_q_rope = q, q_rope
        if SCALED:
            wide_q, wide_q_rope = operand(q), operand(q_rope)
        block_row = table + slot * n_per_slot
        for start in range(begin // TILE * TILE, n_cached, TILE):
            is_token = start + step < n_cached
            block = tl.load(block_row + (start + step) // SIZE, mask=is_token, other=0).to(tl.int64)
            cell = (((block * K + head) * SIZE + (start + step) % SIZE) * D)[:, None]
            inside = is_token[:, None] & (d < E)[None, :]
            score = _rope_scores(wide_q_rope, keys + cell, is_token, D, RANK, BLOCK_R, ROWS, TILE)
            key = tl.load(keys + cell + d[None, :], mask=inside, other=0.0).to(wide_q.dtype)
            value = key
            if OWN_VALUES:
                value = tl.load(values + cell + d[None, :], mask=inside, other=0.0).to(wide_q.dtype)
            seen = is_token[None, :]
            if WINDOW > 0:
                own_position = position + tl.minimum(token, n - 1)
                seen = seen & ((start + step)[None, :] > own_position[:, None] - WINDOW)
            best, total, result = _take_in(best, total, result, wide_q, key, value, score, seen, scale, True)
    # Tokens in rows: first the tiles that every query sees.
    own = position - n_cached
    first = own_rows + tl.load(tile + 5) * W + (FIRST + head) * D
    row_of, where = step[:, None] * W, step[:, None] * W + d[None, :]
    inside = (step >= 0)[:, None] & (d < E)[None, :]
    n_full = own // TILE * TILE
    if WINDOW > 0:  # no tile is certain to be seen by every query
        n_full = tl.maximum(begin - n_cached, 0) // TILE * TILE
        first += n_full.to(tl.int64) * W
    for _ in range(0, 0 if WINDOW > 0 else n_full, TILE):
        score = _rope_scores(q_rope, first + row_of, step >= 0, D, RANK, BLOCK_R, ROWS, TILE)
        key = tl.load(first + where, mask=inside, other=0.0)
        value = key
        if OWN_VALUES:
            value = tl.load(first + K * D + where, mask=inside, other=0.0)
        best, total, result = _take_in(best, total, result, q, key, value, score, inside, scale, False)
        first += TILE * W
    limit = own + tl.minimum(token, n - 1)  # padding rows see a token, so that they do not divide by zero
    for start in range(n_full, own + n, TILE):
        is_token = start + step < own + n
        inside = is_token[:, None] & (d < E)[None, :]
        score = _rope_scores(q_rope, first + row_of, is_token, D, RANK, BLOCK_R, ROWS, TILE)
        key = tl.load(first + where, mask=inside, other=0.0)
        value = key
        if OWN_VALUES:
            value = tl.load(first + K * D + where, mask=inside, other=0.0)
        seen = (start + step)[None, :] <= limit[:, None]
        if WINDOW > 0:
            seen = seen & ((start + step)[None, :] > limit[:, None] - WINDOW)
        best, total, result = _take_in(best, total, result, q, key, value, score, seen, scale, True)
        first += TILE * W
    if SINKS:
        sink = tl.load(sinks + query) * LOG2_E
        highest = tl.maximum(best, sink)
        shrink = tl.exp2(best - highest)
        total = total * shrink + tl.exp2(sink - highest)
        result *= shrink[:, None]
    at = ((row + token) * H + query)[:, None] * D + d[None, :]
    tl.store(out + at, (result * value_scale / total[:, None]).to(out.dtype.element_ty), mask=real)


def _launch_shape(dtype: torch.dtype, rank: int, is_scaled: bool) -> tuple[int, int, int, int]:
    if not rank:
        return _CONTEXT[dtype]
    return (_LATENT_SCALED if is_scaled else _LATENT)[dtype]


def context_tile(
    n_heads: int, n_kv_heads: int, dtype: torch.dtype, rank: int = 0, is_scaled: bool = False
) -> int:
    """Return the query tokens of one program of `context_attention`; `is_scaled`: with an fp8 cache."""
    return max(1, _launch_shape(dtype, rank, is_scaled)[0] // (n_heads // n_kv_heads))


def context_attention(
    qkv: Tensor,
    copied: Tensor | None,
    keys: Tensor,
    values: Tensor,
    scales: Tensor | None,
    table: Tensor,
    tiles: Tensor,
    out: Tensor,
    n_heads: int,
    cached: bool,
    window: int = 0,
    sinks: Tensor | None = None,
    rank: int = 0,
) -> None:
    """Attend causally with several new tokens per sequence, to these and to all earlier tokens.

    Keys and values come from rows of qkv, where a sequence's rows are contiguous, or from rows of `copied`
    (see `copied_rows`). Those of tokens before a sequence's first row come from the cache.

    tiles [m, 6] (int64): first row of the queries, number of queries (at most `context_tile`), position of
    the first query, and slot. Then the number of the sequence's first tokens that are not in rows (0 unless
    `cached`), and the row of the token after them. Other arguments: see `decode_attention`.
    """
    n_kv, d = keys.shape[1], qkv.shape[2]
    size = keys.shape[2]
    rows, tile, n_warps, n_stages = _launch_shape(qkv.dtype, rank, scales is not None)
    groups = groups_of(n_heads // n_kv, rows) if rank else 1
    _context[(n_kv * groups, len(tiles))](
        qkv, qkv if copied is None else copied, keys, values, out if scales is None else scales, table, tiles,
        out, out if sinks is None else sinks, table.stride(0), LOG2_E.value / math.sqrt(d),
        H=n_heads, K=n_kv, D=d, SIZE=size,
        ROWS=max(rows, next_power_of_2(n_heads // n_kv // groups)),
        BLOCK_D=max(16, next_power_of_2(rank or d)),
        TILE=tile, HEADS=n_heads + 2 * n_kv if copied is None else 2 * n_kv,
        FIRST=n_heads if copied is None else 0, CACHED=cached, SCALED=scales is not None,
        WINDOW=window, SINKS=sinks is not None,
        RANK=rank, BLOCK_R=max(16, next_power_of_2(d - rank)), GROUPS=groups,
        num_warps=n_warps, num_stages=n_stages,
    )  # fmt: skip
