"""Triton kernels for decode attention over the paged KV cache, on NVIDIA GPUs.

`context_kernels` has the kernels for contexts.

The cache of a layer is [blocks, kv_heads, tokens_per_block, head_dim] (see `kv_cache`); in fp8 it has
`scales` [2, kv_heads], None in another dtype. `table` [slots, blocks of a sequence] (int32) has the block
numbers of each slot's sequence. Attention is computed as in FlashAttention-2 (Dao, 2023), over blocks in
place as in PagedAttention (Kwon et al., 2023); all query heads that share a KV head are rows of one product.
Decode is split over the context as in Flash-Decoding (Dao et al., 2023). Sums are float32. `step_kernels`
describes when Triton compiles.

With a RANK (latent attention), a key is a latent (see `latent`) followed by rotated values. The latent is
also the token's value, and is read once. The rotated values have a separate product. All query heads share a
key, so a program computes a group of heads.
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
from mpillm.engine.kernels.launch import Kernel, next_power_of_2

LOG2_E = tl.constexpr(math.log2(math.e))
ASSEMBLY = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")  # not in Triton's interpreter
# For decode, without and with an fp8 cache, measured on an H200: keys that a program reads at a time, its
# warps, and pipeline stages.
_DECODE = {False: (32, 1, 4), True: (32, 1, 3)}
# With a latent, by the heads of a program (at least 16): keys, warps, stages.
_LATENT = {64: (64, 8, 2), 32: (64, 4, 2), 16: (32, 4, 3)}
_LATENT_SCALED, _LATENT_FLOAT32 = (32, 4, 2), (32, 8, 1)  # of 16 heads
_MANY_HEADS = 528  # heads of all rows: with fewer heads, programs of 64 heads leave multiprocessors idle
_LATENT_PROGRAMS = 2 * 132  # programs to split contexts into: each fills a multiprocessor
# Programs that an H200 runs simultaneously. Decode splits contexts into nearly as many programs.
_PROGRAMS = 12 * 132
# With an fp8 cache and this register limit, an H200 runs more programs, but each is 2 to 10 % slower than
# without the limit.
_FEW_REGISTERS, _MORE_PROGRAMS = 128, 15 * 132
_MAX_SPLITS = 16
_SHORT_SPLITS = tl.constexpr(_MAX_SPLITS)
# If block tables hold at least _LONG_TABLE tokens, a few sequences are split into more shares, up to
# _LONG_PROGRAMS programs. With more than 16 shares, each has at least _TILES_OF_A_SHARE tiles, because
# joining smaller shares costs more than it saves.
_LONG_TABLE, _LONG_PROGRAMS, _TILES_OF_A_SHARE = 8192, 4 * 128, tl.constexpr(8)
# A step with this many splits has few rows. (A condition on rows would give the kernel variants that the
# warm-up misses.)
_EARLY_SPLITS = 4


@triton.jit
def operand(q):
    """Return queries for products with fp8 keys: bfloat16 as float16, the only type to which GPUs widen fp8.

    float16 represents fp8 keys and values exactly. A query loses values below 2^-24, and is clipped at
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
    both = both.to(tl.int32)  # bits at float16's positions: the numbers divided by 256
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
    WINDOW: tl.constexpr, SINKS: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr,
    GROUPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Attend to a sequence's tokens, or to one of SPLITS shares of them, `TILE` at a time.

    With WINDOW, only the last WINDOW tokens count. With SINKS, a head's total includes its sink.

    The program of a row that finishes last joins the shares, always in the same order.

    Products are transposed, tokens by queries: a tensor core's left operand has at least 16 rows, its right
    operand only 8 columns, and few heads share a KV head.
    """
    after_previous(EARLY)
    group, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    head = group // GROUPS
    G: tl.constexpr = H // K // GROUPS  # queries of a group
    E: tl.constexpr = RANK if RANK > 0 else D  # values of a token
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
    query = group * G + member
    real_query = (member < G)[None, :] & (d < E)[:, None]
    q = tl.load(qkv + (row * (H + 2 * K) + query[None, :]) * D + d[:, None], mask=real_query, other=0.0)
    q_rope, r = q, tl.arange(0, BLOCK_R)
    if RANK > 0:
        real_rope = (member < G)[None, :] & (r < D - RANK)[:, None]
        rope_at = (row * (H + 2 * K) + query[None, :]) * D + RANK + r[:, None]
        q_rope = tl.load(qkv + rope_at, mask=real_rope, other=0.0)
    if SCALED:
        q, q_rope = operand(q), operand(q_rope)
        scale *= tl.load(scales + head)
    block_row = table + tl.load(slots + row) * n_per_slot
    best = tl.full([ROWS], -float("inf"), tl.float32)
    totals = tl.zeros([TILE, ROWS], tl.float32)  # summed over tokens only at the end
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
        at, inside = cell[:, None] + d[None, :], real[:, None] & (d < E)[None, :]
        key = tl.load(keys + at, mask=inside, other=0.0)
        score = tl.zeros([TILE, ROWS], tl.float32)
        if RANK > 0:
            rope_inside = real[:, None] & (r < D - RANK)[None, :]
            rope_key = tl.load(keys + cell[:, None] + RANK + r[None, :], mask=rope_inside, other=0.0)
            score = tl.dot(rope_key.to(q.dtype), q_rope, score, input_precision="ieee")
        score = tl.dot(key.to(q.dtype), q, score, input_precision="ieee") * scale
        score = tl.where(real[:, None], score, -float("inf"))
        highest = tl.maximum(best, tl.max(score, 0))
        weight = tl.exp2(score - highest[None, :])
        shrink = tl.exp2(best - highest)
        totals = totals * shrink[None, :] + weight
        weight = weight.to(q.dtype)
        best = highest
        if SCALED:
            # Tensor cores need values of consecutive tokens side by side; `tl.trans` does that on 16 bits.
            both = tl.load(
                values + (cell // 2)[:, None] + pair[None, :],
                mask=real[:, None] & (pair < E // 2)[None, :],
                other=0,
            )
            value, next_value = _widened_pairs(tl.trans(both))
            even = tl.dot(value.to(q.dtype), weight, even * shrink[None, :], input_precision="ieee")
            odd = tl.dot(next_value.to(q.dtype), weight, odd * shrink[None, :], input_precision="ieee")
        else:
            value = key
            if RANK == 0:
                value = tl.load(values + at, mask=inside, other=0.0)
            value = value.to(q.dtype)
            result = tl.dot(tl.trans(value), weight, result * shrink[None, :], input_precision="ieee")
    total = tl.sum(totals, 0)
    if SCALED:
        result = tl.reshape(tl.permute(tl.join(even, odd), (1, 0, 2)), [ROWS, BLOCK_D])
        result *= tl.load(scales + K + head)
    else:
        result = tl.trans(result)
    at, real_member = row * H + query, member < G
    real_out = real_member[:, None] & (d < E)[None, :]
    if SPLITS > 1:
        own = at * SPLITS + split
        tl.store(parts + own[:, None] * D + d[None, :], result, mask=real_out)
        tl.store(sums + own, total, mask=real_member)
        tl.store(bests + own, best, mask=real_member)
        tl.debug_barrier()  # every thread has stored its part before one thread counts
        if tl.atomic_add(arrived + row * (K * GROUPS) + group, 1, sem="acq_rel") < n_shares - 1:
            return
        tl.store(arrived + row * (K * GROUPS) + group, 0)  # for the next layer
        shares = at[:, None] * SPLITS + tl.arange(0, SPLITS)[None, :]
        computed = real_member[:, None] & (tl.arange(0, SPLITS) < n_shares)[None, :]
        highests = tl.load(bests + shares, mask=computed, other=-float("inf"))
        best = tl.where(real_member, tl.max(highests, 1), 0.0)
        weights = tl.exp2(highests - best[:, None])
        total = tl.sum(weights * tl.load(sums + shares, mask=computed, other=0.0), 1)
        result = tl.zeros([ROWS, BLOCK_D], tl.float32)
        # Loads that are in flight simultaneously.
        JOINED: tl.constexpr = 2 if RANK > 0 else SPLITS if SPLITS < _SHORT_SPLITS else _SHORT_SPLITS
        for start in range(0, n_shares, JOINED):
            for i in tl.static_range(JOINED):
                joined = at * SPLITS + start + i
                real_share = real_member & (joined < at * SPLITS + n_shares)
                weight = tl.exp2(tl.load(bests + joined, mask=real_share, other=-float("inf")) - best)
                inside = real_share[:, None] & (d < E)[None, :]
                part = tl.load(parts + joined[:, None] * D + d[None, :], mask=inside, other=0.0)
                result += part * weight[:, None]
    if SINKS:
        sink = tl.load(sinks + query, mask=real_member, other=0.0) * LOG2_E
        highest = tl.maximum(best, sink)
        shrink = tl.exp2(best - highest)
        total = total * shrink + tl.exp2(sink - highest)
        result *= shrink[:, None]
    tl.store(
        out + at[:, None] * D + d[None, :], (result / total[:, None]).to(out.dtype.element_ty), mask=real_out
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
    rank: int = 0,
) -> None:
    """Attend with one new token per row: out [n, heads * head_dim].

    With a `rank`, only the first `rank` values of each head are written.

    `window`, `sinks`, `rank`: see `LayerKind`. Other arguments: see `step_kernels.rotate_store`.
    """
    n, _, d = qkv.shape
    k, size = keys.shape[1:3]
    if scales is not None:
        values = values.view(torch.int16)
    tile, n_warps, n_stages = _DECODE[scales is not None]
    if qkv.dtype == torch.float32:  # no tensor cores: more registers
        n_warps, n_stages = 4, 2
    groups, max_programs = 1, _PROGRAMS
    if rank:
        is_narrow = scales is not None or qkv.dtype == torch.float32 or n * n_heads < _MANY_HEADS
        groups, max_programs = groups_of(n_heads // k, 16 if is_narrow else 64), _LATENT_PROGRAMS
        tile, n_warps, n_stages = _LATENT[max(16, next_power_of_2(n_heads // k // groups))]
        if qkv.dtype == torch.float32:
            tile, n_warps, n_stages = _LATENT_FLOAT32
        elif scales is not None:
            tile, n_warps, n_stages = _LATENT_SCALED
    splits = _splits(n * k * groups, table.stride(0) * size, max_programs)
    rows, block_d = max(8, next_power_of_2(n_heads // k // groups)), max(32, next_power_of_2(rank or d))
    registers = {}
    if scales is not None and not rank and _PROGRAMS < n * k <= _MORE_PROGRAMS:
        registers["maxnreg"] = _FEW_REGISTERS
    parts = out if splits == 1 else qkv.new_empty(n, n_heads, splits, d, dtype=torch.float32)
    sums, bests = (out, out) if splits == 1 else qkv.new_empty(2, n, n_heads, splits, dtype=torch.float32)
    arrived = out if splits == 1 else _arrived(qkv.device)
    _decode[(k * groups, n, splits)](
        qkv, keys, values, out if scales is None else scales, table, slots, positions, out, parts, sums,
        bests, arrived, out if sinks is None else sinks, table.stride(0), LOG2_E.value / math.sqrt(d),
        H=n_heads, K=k, D=d, SIZE=size, ROWS=rows, BLOCK_D=block_d, TILE=tile, SPLITS=splits,
        SCALED=scales is not None, WINDOW=window, SINKS=sinks is not None,
        RANK=rank, BLOCK_R=max(16, next_power_of_2(d - rank)), GROUPS=groups,
        EARLY=splits >= _EARLY_SPLITS and can_start_early(qkv.device),
        num_warps=n_warps, num_stages=n_stages,
        **registers,
    )  # fmt: skip


def groups_of(n_heads: int, max_heads: int) -> int:
    """Return into how many equal groups, of at most `max_heads`, to split the heads that share a key."""
    return next(n for n in range(1, n_heads + 1) if n_heads % n == 0 and n_heads // n <= max_heads)


def _splits(n_programs: int, table_tokens: int, max_programs: int) -> int:
    """Return into how many shares, a power of two, to split each of `n_programs` contexts."""
    splits = min(_MAX_SPLITS, 1 << max(1, max_programs // n_programs).bit_length() - 1)
    if table_tokens >= _LONG_TABLE:
        splits = max(splits, 1 << max(1, _LONG_PROGRAMS // n_programs).bit_length() - 1)
    return min(splits, 64)


@functools.cache
def _arrived(device: torch.device) -> Tensor:
    """Return a counter of finished programs for each row and KV head of split contexts; 0 between kernels."""
    return torch.zeros(_PROGRAMS, dtype=torch.int32, device=device)
