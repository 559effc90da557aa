"""Triton kernels of handoffs: KV caches from blocks into contiguous pieces and back, or into blocks of
another GPU."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mpillm.engine.kernels.launch import Kernel, next_power_of_2
from mpillm.engine.kernels.puts import TargetCache

_PUTTING = 132  # programs: so many fill a link (64 reach 0.95 of it)


@Kernel
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
    PARTS: tl.constexpr,
    INTO_PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i, part = tl.program_id(0), tl.program_id(1)
    block, first = tl.load(table + i), tl.load(table + n + i)
    n_tokens, address = tl.load(table + 2 * n + i), tl.load(table + 3 * n + i)
    layer, head = (part // N_PIECE_HEADS).to(tl.int64), part % N_PIECE_HEADS
    source = ((layer * n_blocks + block) * n_heads + first_head + head) * (SIZE * DIM)
    # A key's; values come after all keys of the layer.
    piece = address.to(keys.dtype) + ((PARTS * layer * N_PIECE_HEADS + head) * n_tokens + first) * DIM
    value = N_PIECE_HEADS * n_tokens * DIM
    end = tl.minimum(n_tokens - first, SIZE) * DIM
    for start in range(0, SIZE * DIM, BLOCK):
        at = start + tl.arange(0, BLOCK)
        real = at < end
        key_there, value_there = tl.multiple_of(piece + at, 16), tl.multiple_of(piece + value + at, 16)
        if INTO_PIECES:
            tl.store(key_there, tl.load(keys + source + at, mask=real), mask=real)
            if PARTS == 2:
                tl.store(value_there, tl.load(values + source + at, mask=real), mask=real)
        else:
            tl.store(keys + source + at, tl.load(key_there, mask=real), mask=real)
            if PARTS == 2:
                tl.store(values + source + at, tl.load(value_there, mask=real), mask=real)


def copy_blocks(
    keys: Tensor, values: Tensor, table: Tensor, first_head: int, n_heads: int, into_pieces: bool
) -> None:
    """Copy blocks of the cache into pieces of several handoffs, or back.

    keys, values: [layers, blocks, kv_heads, tokens_per_block, head_dim]; one tensor, if they are latents. A
    piece is contiguous, [layers, 2 or 1, heads, tokens, head_dim]; its heads are `n_heads` of the cache's
    from `first_head` on. `table` (int64 [4, n]) has for each block its number, the index of its first token,
    the piece's tokens and its address.
    """
    n_layers, n_blocks, n_cache_heads, size, dim = keys.shape
    block, n = min(2048, next_power_of_2(size * dim)), table.shape[1]
    _copy_blocks[(n, n_layers * n_heads)](
        *(keys, values, table, n, n_blocks, first_head, n_cache_heads, n_heads, size, dim),
        *(_n_parts(keys, values), into_pieces, block),
    )


@Kernel
@triton.jit(do_not_specialize=["n_items", "n_rows"])
def _put_blocks(
    keys, values, keys_there, values_there, table, n_items, n_rows, n_blocks, n_heads, n_blocks_there,
    n_heads_there,
    N_PIECE_HEADS: tl.constexpr, SIZE: tl.constexpr, SIZE_THERE: tl.constexpr, DIM: tl.constexpr,
    PARTS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_D: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    keys_there = tl.multiple_of(keys_there.to(keys.dtype), 16)
    values_there = tl.multiple_of(values_there.to(keys.dtype), 16)
    column = tl.arange(0, BLOCK_D)
    for item in range(tl.program_id(0), n_items, PROGRAMS):
        row, part = table + 8 * (item % n_rows), item // n_rows
        block, first, n_tokens, there = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
        layer, head = part // N_PIECE_HEADS, part % N_PIECE_HEADS
        source = ((tl.load(row + 4) + layer) * n_blocks + block) * n_heads + tl.load(row + 5) + head
        layer_there, head_there = tl.load(row + 6) + layer, tl.load(row + 7) + head
        for start in range(0, SIZE, TOKENS):
            token = start + tl.arange(0, TOKENS)
            place = first + token
            real = place < n_tokens
            block_there = tl.load(table + there + place // SIZE_THERE, mask=real, other=0)
            to = (layer_there * n_blocks_there + block_there) * n_heads_there + head_there
            to = (to * SIZE_THERE + place % SIZE_THERE) * DIM
            at = (source * SIZE + token) * DIM
            mask = (real & (token < SIZE))[:, None] & (column < DIM)[None, :]
            key = tl.load(keys + at[:, None] + column[None, :], mask=mask)
            tl.store(keys_there + to[:, None] + column[None, :], key, mask=mask)
            if PARTS == 2:
                value = tl.load(values + at[:, None] + column[None, :], mask=mask)
                tl.store(values_there + to[:, None] + column[None, :], value, mask=mask)


def put_blocks(
    keys: Tensor, values: Tensor, to: TargetCache, table: Tensor, n_rows: int, n_layers: int, n_heads: int
) -> None:
    """Copy `n_layers` and `n_heads` of blocks into those of a cache of the same type on another GPU.

    keys, values: [layers, blocks, kv_heads, tokens_per_block, head_dim]. `table` (int64) has for each of
    `n_rows` blocks its number, its first token, the sequence's tokens, where in the table the sequence's
    blocks there are, and the first layer and head here and there. The blocks there follow.
    """
    _, n_blocks, n_cache_heads, size, dim = keys.shape
    n_items = n_rows * n_layers * n_heads
    block_d = next_power_of_2(dim)
    _put_blocks[(min(n_items, _PUTTING),)](
        keys, values, to.keys, to.values, table, n_items, n_rows, n_blocks, n_cache_heads,
        to.n_blocks, to.n_heads,
        N_PIECE_HEADS=n_heads, SIZE=size, SIZE_THERE=to.tokens_per_block, DIM=dim,
        PARTS=_n_parts(keys, values),
        TOKENS=min(next_power_of_2(size), max(1, 4096 // block_d)), BLOCK_D=block_d, PROGRAMS=_PUTTING,
        num_warps=8,
    )  # fmt: skip


def _n_parts(keys: Tensor, values: Tensor) -> int:
    return 1 if keys.data_ptr() == values.data_ptr() else 2
