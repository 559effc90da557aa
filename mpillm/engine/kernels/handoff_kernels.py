"""Triton kernels of handoffs: copy KV blocks to contiguous pieces and back, or to another GPU's blocks."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mpillm.engine.kernels.launch import Kernel, next_power_of_2
from mpillm.engine.kernels.puts import TargetCache

_PUT_PROGRAMS = 132  # they saturate a link (64 programs reach 0.95 of its bandwidth)


@Kernel
@triton.jit(do_not_specialize=["n_blocks", "first_head", "n"])
def _copy_blocks(
    keys, values, table, n, n_blocks, first_head, n_heads,
    N_PIECE_HEADS: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr,
    PARTS: tl.constexpr, INTO_PIECES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i, part = tl.program_id(0), tl.program_id(1)
    block, first = tl.load(table + i), tl.load(table + n + i)
    n_tokens, address = tl.load(table + 2 * n + i), tl.load(table + 3 * n + i)
    layer, head = (part // N_PIECE_HEADS).to(tl.int64), part % N_PIECE_HEADS
    source = ((layer * n_blocks + block) * n_heads + first_head + head) * (SIZE * DIM)
    # The key's address. Values come after all keys of the layer.
    piece = address.to(keys.dtype) + ((PARTS * layer * N_PIECE_HEADS + head) * n_tokens + first) * DIM
    value = N_PIECE_HEADS * n_tokens * DIM
    end = tl.minimum(n_tokens - first, SIZE) * DIM
    for start in range(0, SIZE * DIM, BLOCK):
        at = start + tl.arange(0, BLOCK)
        real = at < end
        piece_key, piece_value = tl.multiple_of(piece + at, 16), tl.multiple_of(piece + value + at, 16)
        if INTO_PIECES:
            tl.store(piece_key, tl.load(keys + source + at, mask=real), mask=real)
            if PARTS == 2:
                tl.store(piece_value, tl.load(values + source + at, mask=real), mask=real)
        else:
            tl.store(keys + source + at, tl.load(piece_key, mask=real), mask=real)
            if PARTS == 2:
                tl.store(values + source + at, tl.load(piece_value, mask=real), mask=real)


def copy_blocks(
    keys: Tensor, values: Tensor, table: Tensor, first_head: int, n_heads: int, into_pieces: bool
) -> None:
    """Copy blocks of the cache into pieces of several handoffs, or back.

    keys, values: [layers, blocks, kv_heads, tokens_per_block, head_dim]; the same tensor if they are latents.
    A piece is contiguous, [layers, 2 or 1, heads, tokens, head_dim]. It contains `n_heads` of the cache's
    heads from `first_head` on. `table` (int64 [4, n]) has for each block its number, the index of its first
    token, the piece's number of tokens, and the piece's address.
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
    keys, values, target_keys, target_values, table, n_items, n_rows, n_blocks, n_heads, n_target_blocks,
    n_target_heads,
    N_PIECE_HEADS: tl.constexpr, SIZE: tl.constexpr, TARGET_SIZE: tl.constexpr, DIM: tl.constexpr,
    PARTS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_D: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    target_keys = tl.multiple_of(target_keys.to(keys.dtype), 16)
    target_values = tl.multiple_of(target_values.to(keys.dtype), 16)
    column = tl.arange(0, BLOCK_D)
    for item in range(tl.program_id(0), n_items, PROGRAMS):
        row, part = table + 8 * (item % n_rows), item // n_rows
        block, first, n_tokens, target_at = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
        layer, head = part // N_PIECE_HEADS, part % N_PIECE_HEADS
        source = ((tl.load(row + 4) + layer) * n_blocks + block) * n_heads + tl.load(row + 5) + head
        target_layer, target_head = tl.load(row + 6) + layer, tl.load(row + 7) + head
        for start in range(0, SIZE, TOKENS):
            token = start + tl.arange(0, TOKENS)
            place = first + token
            real = place < n_tokens
            target_block = tl.load(table + target_at + place // TARGET_SIZE, mask=real, other=0)
            to = (target_layer * n_target_blocks + target_block) * n_target_heads + target_head
            to = (to * TARGET_SIZE + place % TARGET_SIZE) * DIM
            at = (source * SIZE + token) * DIM
            mask = (real & (token < SIZE))[:, None] & (column < DIM)[None, :]
            key = tl.load(keys + at[:, None] + column[None, :], mask=mask)
            tl.store(target_keys + to[:, None] + column[None, :], key, mask=mask)
            if PARTS == 2:
                value = tl.load(values + at[:, None] + column[None, :], mask=mask)
                tl.store(target_values + to[:, None] + column[None, :], value, mask=mask)


def put_blocks(
    keys: Tensor, values: Tensor, to: TargetCache, table: Tensor, n_rows: int, n_layers: int, n_heads: int
) -> None:
    """Copy `n_layers` and `n_heads` of blocks into a cache of the same dtype on another GPU.

    keys, values: [layers, blocks, kv_heads, tokens_per_block, head_dim]. `table` (int64) has a row for each
    of `n_rows` blocks: its number, its first token, the sequence's number of tokens, the table index of the
    sequence's target blocks, the first layer and head, and the first target layer and head. The target blocks
    of all sequences follow the rows.
    """
    _, n_blocks, n_cache_heads, size, dim = keys.shape
    n_items = n_rows * n_layers * n_heads
    block_d = next_power_of_2(dim)
    _put_blocks[(min(n_items, _PUT_PROGRAMS),)](
        keys, values, to.keys, to.values, table, n_items, n_rows, n_blocks, n_cache_heads,
        to.n_blocks, to.n_heads,
        N_PIECE_HEADS=n_heads, SIZE=size, TARGET_SIZE=to.tokens_per_block, DIM=dim,
        PARTS=_n_parts(keys, values),
        TOKENS=min(next_power_of_2(size), max(1, 4096 // block_d)), BLOCK_D=block_d, PROGRAMS=_PUT_PROGRAMS,
        num_warps=8,
    )  # fmt: skip


def _n_parts(keys: Tensor, values: Tensor) -> int:
    return 1 if keys.data_ptr() == values.data_ptr() else 2
