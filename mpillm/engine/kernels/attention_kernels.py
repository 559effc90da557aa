"""Triton kernels for attention over the paged KV cache, on NVIDIA GPUs.

The cache of a layer is [blocks, kv_heads, tokens_per_block, head_dim] (see `kv_cache`); in fp8 it has
`scales` [2, kv_heads], None in another dtype. `table` [slots, blocks of a sequence] (int32) names the blocks
of a sequence. Attention is computed as in FlashAttention-2 (Dao, 2023), over blocks in place as in
PagedAttention (Kwon et al., 2023); all query heads that share a KV head are rows of one product. Decode is
split over the context as in Flash-Decoding (Dao et al., 2023). Sums are float32. As to compilation, see
`step_kernels`.
"""

from __future__ import annotations

import functools
import math
import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpillm.engine.kernels.early_starts import after_previous, can_start_early
from mpillm.engine.kernels.launch import Kernel, cdiv, next_power_of_2

_LOG2_E = tl.constexpr(math.log2(math.e))
# What no score is below: where a row sees none of a tile, nothing is subtracted from infinity.
_LOWEST = tl.constexpr(-1.0e30)
ASSEMBLY = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")  # Triton's interpreter has none
# For contexts, measured on an H200: query rows of a program, over all heads that share a KV head; keys that
# it takes at a time; its warps; pipeline stages.
_CONTEXT = {torch.bfloat16: (128, 64, 8, 3), torch.float32: (16, 32, 8, 2)}
# For decode, without and with an fp8 cache, measured likewise: keys that a program takes at a time, its
# warps, and pipeline stages.
_DECODE = {False: (32, 1, 4), True: (32, 1, 3)}
# So many run at once on an H200; more wait for these to end. Decode splits contexts to have nearly as many.
_PROGRAMS = 12 * 132
# With an fp8 cache and so many registers it is so many programs; each is 2 to 10 % slower.
_FEW_REGISTERS, _MORE_PROGRAMS = 128, 15 * 132
_MOST_SPLITS = 16
_SHORT_SPLITS = tl.constexpr(_MOST_SPLITS)
# Where a table has room for so many tokens, few sequences have more shares, up to so many programs in all. A
# share beyond the sixteenth has so many tiles at least, or joining it costs more than it saves.
_LONG_TABLE, _LONG_PROGRAMS, _TILES_OF_A_SHARE = 8192, 4 * 128, tl.constexpr(8)
# With so many a step has few rows. (By rows alone the kernel would have more forms than a warm-up meets.)
_EARLY_SPLITS = 4


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
def _widened_pairs(both):
    """Return the first and the second of each pair of fp8 numbers (int16), as float16."""
    if ASSEMBLY:  # two pairs at a time
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 first, second;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {first, second}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, first;
            cvt.rn.f16x2.e4m3x2 $1, second;
            }""",
            "=r,=r,r", [both], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    both = both.to(tl.int32)  # bits in the places that float16 gives them: numbers over 256
    first = (((both & 0x80) << 8) | ((both & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
    second = ((both & 0x8000) | ((both >> 1) & 0x3F80)).to(tl.int16).to(tl.float16, bitcast=True)
    return first * 256.0, second * 256.0


@Kernel
@triton.jit(do_not_specialize_on_alignment=["slots", "positions", "sums", "bests"])
def _decode(
    qkv, keys, values, scales, table, slots, positions, out, parts, sums, bests, arrived, sinks, n_per_slot,
    scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, SCALED: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Attend to a sequence's tokens, or to one of SPLITS shares of them, `TILE` at a time.

    With WINDOW only to the last ones. With SINKS a head's total has its sink's share, too.

    The last program of a row to finish joins the shares, always in the same order.

    Products are transposed, tokens by queries: a tensor core's left operand has at least 16 rows, its right
    one only 8 columns, and few heads share a KV head.
    """
    after_previous(EARLY)
    head, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    G: tl.constexpr = H // K
    member, d, pair = tl.arange(0, ROWS), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D // 2)
    position = tl.load(positions + row).to(tl.int32)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(position + 1 - WINDOW, 0) // TILE * TILE
    n_tiles, n_shares = tl.cdiv(position + 1 - begin, TILE), SPLITS
    if SPLITS > _SHORT_SPLITS:
        n_shares = tl.minimum(SPLITS, tl.maximum(_SHORT_SPLITS, n_tiles // _TILES_OF_A_SHARE))
        if split >= n_shares:
            return
    share = tl.cdiv(n_tiles, n_shares) * TILE
    first = begin + split * share
    last = tl.minimum(first + share, position + 1)
    query = head * G + member
    real_query = (member < G)[None, :] & (d < D)[:, None]
    q = tl.load(qkv + (row * (H + 2 * K) + query[None, :]) * D + d[:, None], mask=real_query, other=0.0)
    if SCALED:
        q = _operand(q)
        scale *= tl.load(scales + head)
    block_row = table + tl.load(slots + row) * n_per_slot
    best = tl.full([ROWS], -float("inf"), tl.float32)
    totals = tl.zeros([TILE, ROWS], tl.float32)  # summed over tokens only in the end
    if SCALED:
        even = tl.zeros([BLOCK_D // 2, ROWS], tl.float32)
        odd = tl.zeros([BLOCK_D // 2, ROWS], tl.float32)
    else:
        result = tl.zeros([BLOCK_D, ROWS], tl.float32)
    for start in range(first, last, TILE):
        token = start + tl.arange(0, TILE)
        real = token < last
        if WINDOW > 0:
            real = real & (token > position - WINDOW)
        block = tl.load(block_row + token // SIZE, mask=real, other=0).to(tl.int64)
        cell = ((block * K + head) * SIZE + token % SIZE) * D
        at, inside = cell[:, None] + d[None, :], real[:, None] & (d < D)[None, :]
        key = tl.load(keys + at, mask=inside, other=0.0)
        score = tl.dot(key.to(q.dtype), q, input_precision="ieee") * scale
        score = tl.where(real[:, None], score, -float("inf"))
        highest = tl.maximum(best, tl.max(score, 0))
        weight = tl.exp2(score - highest[None, :])
        shrink = tl.exp2(best - highest)
        totals = totals * shrink[None, :] + weight
        weight = weight.to(q.dtype)
        best = highest
        if SCALED:
            # Tensor cores want values of consecutive tokens side by side: that works 16 bits at a time.
            both = tl.load(
                values + (cell // 2)[:, None] + pair[None, :],
                mask=real[:, None] & (pair < D // 2)[None, :],
                other=0,
            )
            value, next_value = _widened_pairs(tl.trans(both))
            even = tl.dot(value.to(q.dtype), weight, even * shrink[None, :], input_precision="ieee")
            odd = tl.dot(next_value.to(q.dtype), weight, odd * shrink[None, :], input_precision="ieee")
        else:
            value = tl.load(values + at, mask=inside, other=0.0).to(q.dtype)
            result = tl.dot(tl.trans(value), weight, result * shrink[None, :], input_precision="ieee")
    total = tl.sum(totals, 0)
    if SCALED:
        result = tl.reshape(tl.permute(tl.join(even, odd), (1, 0, 2)), [ROWS, BLOCK_D])
        result *= tl.load(scales + K + head)
    else:
        result = tl.trans(result)
    at, real_member = row * H + query, member < G
    real_out = real_member[:, None] & (d < D)[None, :]
    if SPLITS > 1:
        own = at * SPLITS + split
        tl.store(parts + own[:, None] * D + d[None, :], result, mask=real_out)
        tl.store(sums + own, total, mask=real_member)
        tl.store(bests + own, best, mask=real_member)
        tl.debug_barrier()  # every thread has stored its part before one of them counts
        if tl.atomic_add(arrived + row * K + head, 1, sem="acq_rel") < n_shares - 1:
            return
        tl.store(arrived + row * K + head, 0)  # for the next layer
        shares = at[:, None] * SPLITS + tl.arange(0, SPLITS)[None, :]
        computed = real_member[:, None] & (tl.arange(0, SPLITS) < n_shares)[None, :]
        highests = tl.load(bests + shares, mask=computed, other=-float("inf"))
        best = tl.where(real_member, tl.max(highests, 1), 0.0)
        weights = tl.exp2(highests - best[:, None])
        total = tl.sum(weights * tl.load(sums + shares, mask=computed, other=0.0), 1)
        result = tl.zeros([ROWS, BLOCK_D], tl.float32)
        # So many loads are on their way at once.
        JOINED: tl.constexpr = SPLITS if SPLITS < _SHORT_SPLITS else _SHORT_SPLITS
        for start in range(0, n_shares, JOINED):
            for i in tl.static_range(JOINED):
                joined = at * SPLITS + start + i
                there = real_member & (joined < at * SPLITS + n_shares)
                weight = tl.exp2(tl.load(bests + joined, mask=there, other=-float("inf")) - best)
                inside = there[:, None] & (d < D)[None, :]
                part = tl.load(parts + joined[:, None] * D + d[None, :], mask=inside, other=0.0)
                result += part * weight[:, None]
    if SINKS:
        sink = tl.load(sinks + query, mask=real_member, other=0.0) * _LOG2_E
        highest = tl.maximum(best, sink)
        shrink = tl.exp2(best - highest)
        total = total * shrink + tl.exp2(sink - highest)
        result *= shrink[:, None]
    tl.store(
        out + at[:, None] * D + d[None, :],
        (result / total[:, None]).to(out.dtype.element_ty),
        mask=real_out,
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
    window: int = 0,
    sinks: Tensor | None = None,
) -> None:
    """Attend with one new token per row: out [n, heads * head_dim].

    `window`, `sinks`: see `LayerKind`. The other arguments are those of `step_kernels.rotate_store`.
    """
    n, _, d = qkv.shape
    k, size = keys.shape[1:3]
    if scales is not None:
        values = values.view(torch.int16)
    splits = _splits(n * k, table.stride(0) * size)
    tile, n_warps, n_stages = _DECODE[scales is not None]
    if qkv.dtype == torch.float32:  # no tensor cores: more registers
        n_warps, n_stages = 4, 2
    rows, block_d = max(8, next_power_of_2(n_heads // k)), max(32, next_power_of_2(d))
    registers = {}
    if scales is not None and _PROGRAMS < n * k <= _MORE_PROGRAMS:
        registers["maxnreg"] = _FEW_REGISTERS
    parts = out if splits == 1 else qkv.new_empty(n, n_heads, splits, d, dtype=torch.float32)
    sums, bests = (out, out) if splits == 1 else qkv.new_empty(2, n, n_heads, splits, dtype=torch.float32)
    arrived = out if splits == 1 else _arrived(qkv.device)
    _decode[(k, n, splits)](
        qkv, keys, values, out if scales is None else scales, table, slots, positions, out, parts, sums,
        bests, arrived, out if sinks is None else sinks, table.stride(0), _LOG2_E.value / math.sqrt(d),
        H=n_heads, K=k, D=d, SIZE=size, ROWS=rows, BLOCK_D=block_d, TILE=tile, SPLITS=splits,
        SCALED=scales is not None, WINDOW=window, SINKS=sinks is not None,
        EARLY=splits >= _EARLY_SPLITS and can_start_early(qkv.device),
        num_warps=n_warps, num_stages=n_stages,
        **registers,
    )  # fmt: skip


def _splits(n_programs: int, table_tokens: int) -> int:
    """Return the most shares, a power of two, of `n_programs` contexts in tables of `table_tokens`."""
    splits = min(_MOST_SPLITS, 1 << max(1, _PROGRAMS // n_programs).bit_length() - 1)
    if table_tokens >= _LONG_TABLE:
        splits = max(splits, 1 << max(1, _LONG_PROGRAMS // n_programs).bit_length() - 1)
    return min(splits, 64)


@functools.cache
def _arrived(device: torch.device) -> Tensor:
    """Return a count of programs for each row and KV head of split contexts; zero between kernels."""
    return torch.zeros(_PROGRAMS, dtype=torch.int32, device=device)


@triton.jit
def _take_in(best, total, result, q, key, value, seen, scale, MASKED: tl.constexpr):
    """Add a tile of keys and values, of which each row sees `seen`, to the running softmax.

    Returns the largest score (log2), the sum of the weights relative to it, and the weighted values.
    """
    score = tl.dot(q, tl.trans(key), input_precision="ieee")
    if MASKED:
        score = tl.where(seen, score, -float("inf"))
    highest = tl.maximum(best, tl.max(score, 1) * scale)
    weight = tl.exp2(score * scale - highest[:, None])
    shrink = tl.exp2(best - highest)
    total = total * shrink + tl.sum(weight, 1)
    return highest, total, tl.dot(weight.to(q.dtype), value, result * shrink[:, None], input_precision="ieee")


@Kernel
@triton.jit(do_not_specialize_on_alignment=["copies"])
def _copy(
    rows, keys, values, table, copies, n_per_slot,
    K: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head, copy = tl.program_id(0), copies + tl.program_id(2) * 3
    slot, n, first = tl.load(copy), tl.load(copy + 1).to(tl.int32), tl.load(copy + 2)
    token, d = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, BLOCK_D)
    held = token < n
    block = tl.load(table + slot * n_per_slot + token // SIZE, mask=held, other=0).to(tl.int64)
    cell = (((block * K + head) * SIZE + token % SIZE) * D)[:, None] + d[None, :]
    row = rows + (((first + token) * 2 * K + head) * D)[:, None] + d[None, :]
    inside = held[:, None] & (d < D)[None, :]
    key = tl.load(keys + cell, mask=inside, other=0.0)
    tl.store(row, key.to(tl.float32).to(rows.dtype.element_ty), mask=inside)
    value = tl.load(values + cell, mask=inside, other=0.0)
    tl.store(row + K * D, value.to(tl.float32).to(rows.dtype.element_ty), mask=inside)


def copied_rows(
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    copies: Tensor,
    n_rows: int,
    longest: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return keys and values of whole sequences, out of their blocks: [n_rows, 2 * kv_heads, head_dim].

    They keep the cache's numbers, without its scales. copies [m, 3] (int64): slot, tokens (at most
    `longest`), and the row of the first; the rows of all sequences are `n_rows`.
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
):  # fmt: skip
    head, tile = tl.program_id(0), tiles + tl.program_id(1) * 6
    G: tl.constexpr = H // K
    W: tl.constexpr = HEADS * D
    row, slot, position = tl.load(tile), tl.load(tile + 3), tl.load(tile + 2).to(tl.int32)
    n, n_cached = tl.load(tile + 1).to(tl.int32), tl.load(tile + 4).to(tl.int32)
    member, d, step = tl.arange(0, ROWS), tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    query, token = head * G + member % G, member // G
    real = (token < n)[:, None] & (d < D)[None, :]
    q = tl.load(qkv + (((row + token) * (H + 2 * K) + query) * D)[:, None] + d[None, :], mask=real, other=0.0)
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
    if CACHED:  # what only blocks hold
        wide_q = q
        if SCALED:
            wide_q = _operand(q)
        block_row = table + slot * n_per_slot
        for start in range(begin // TILE * TILE, n_cached, TILE):
            held = start + step < n_cached
            block = tl.load(block_row + (start + step) // SIZE, mask=held, other=0).to(tl.int64)
            cell = (((block * K + head) * SIZE + (start + step) % SIZE) * D)[:, None] + d[None, :]
            inside = held[:, None] & (d < D)[None, :]
            key = tl.load(keys + cell, mask=inside, other=0.0).to(wide_q.dtype)
            value = tl.load(values + cell, mask=inside, other=0.0).to(wide_q.dtype)
            seen = held[None, :]
            if WINDOW > 0:
                own_position = position + tl.minimum(token, n - 1)
                seen = seen & ((start + step)[None, :] > own_position[:, None] - WINDOW)
            best, total, result = _take_in(best, total, result, wide_q, key, value, seen, scale, True)
    # What is in rows: first the tiles that every query sees.
    own = position - n_cached
    first = own_rows + tl.load(tile + 5) * W + (FIRST + head) * D
    where, inside = step[:, None] * W + d[None, :], (step >= 0)[:, None] & (d < D)[None, :]
    n_full = own // TILE * TILE
    if WINDOW > 0:  # of which no tile is known to be seen by every query
        n_full = tl.maximum(begin - n_cached, 0) // TILE * TILE
        first += n_full.to(tl.int64) * W
    for _ in range(0, 0 if WINDOW > 0 else n_full, TILE):
        key = tl.load(first + where, mask=inside, other=0.0)
        value = tl.load(first + K * D + where, mask=inside, other=0.0)
        best, total, result = _take_in(best, total, result, q, key, value, inside, scale, False)
        first += TILE * W
    limit = own + tl.minimum(token, n - 1)  # padding rows see something, or they would divide by zero
    for start in range(n_full, own + n, TILE):
        inside = (start + step < own + n)[:, None] & (d < D)[None, :]
        key = tl.load(first + where, mask=inside, other=0.0)
        value = tl.load(first + K * D + where, mask=inside, other=0.0)
        seen = (start + step)[None, :] <= limit[:, None]
        if WINDOW > 0:
            seen = seen & ((start + step)[None, :] > limit[:, None] - WINDOW)
        best, total, result = _take_in(best, total, result, q, key, value, seen, scale, True)
        first += TILE * W
    if SINKS:
        sink = tl.load(sinks + query) * _LOG2_E
        highest = tl.maximum(best, sink)
        shrink = tl.exp2(best - highest)
        total = total * shrink + tl.exp2(sink - highest)
        result *= shrink[:, None]
    at = ((row + token) * H + query)[:, None] * D + d[None, :]
    tl.store(out + at, (result * value_scale / total[:, None]).to(out.dtype.element_ty), mask=real)


def context_tile(n_heads: int, n_kv_heads: int, dtype: torch.dtype) -> int:
    """Return the query tokens of one program of `context_attention`."""
    return max(1, _CONTEXT[dtype][0] // (n_heads // n_kv_heads))


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
) -> None:
    """Attend with several new tokens per sequence, causally, to them and to everything before.

    Keys and values come from rows: of qkv, those of a sequence side by side, or of `copied` (see
    `copied_rows`). Only those before a sequence's first row come from the cache.

    tiles [m, 6] (int64): first row of the queries, how many (at most `context_tile`), position of the first,
    slot, how many tokens of the sequence are not in rows (none unless `cached`), and the row of the next
    one. The rest as in `decode_attention`.
    """
    n_kv, d = keys.shape[1], qkv.shape[2]
    size = keys.shape[2]
    rows, tile, n_warps, n_stages = _CONTEXT[qkv.dtype]
    _context[(n_kv, len(tiles))](
        qkv, qkv if copied is None else copied, keys, values, out if scales is None else scales, table, tiles,
        out, out if sinks is None else sinks, table.stride(0), _LOG2_E.value / math.sqrt(d),
        H=n_heads, K=n_kv, D=d, SIZE=size,
        ROWS=max(rows, next_power_of_2(n_heads // n_kv)), BLOCK_D=max(16, next_power_of_2(d)),
        TILE=tile, HEADS=n_heads + 2 * n_kv if copied is None else 2 * n_kv,
        FIRST=n_heads if copied is None else 0, CACHED=cached, SCALED=scales is not None,
        WINDOW=window, SINKS=sinks is not None,
        num_warps=n_warps, num_stages=n_stages,
    )  # fmt: skip
