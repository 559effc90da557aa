"""Writes from a KV cache into blocks of a KV cache on another GPU: see `handoff.peer_mover`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Put(NamedTuple):
    """The blocks, layers and heads of a sequence to copy from one cache to another."""

    n_tokens: int
    blocks: list[int]
    target_blocks: list[int]
    layer: int  # the first layer
    head: int
    target_layer: int
    target_head: int
    first: int = 0  # first token to copy: the target does not need earlier tokens


class TargetCache(NamedTuple):
    """A KV cache on another GPU, by its addresses in this process."""

    keys: int  # address
    values: int
    n_blocks: int  # with the null block
    n_heads: int
    tokens_per_block: int


def put_table(puts: list[Put], tokens_per_block: int) -> tuple[NDArray[np.int64], int]:
    """Return the table that `handoff_kernels.put_blocks` reads, and its number of rows."""
    firsts = [put.first // tokens_per_block for put in puts]
    ends = [-(-put.n_tokens // tokens_per_block) for put in puts]
    counts = [end - first for first, end in zip(firsts, ends, strict=True)]
    n_rows, n_target = sum(counts), sum(len(put.target_blocks) for put in puts)
    table = np.empty(8 * n_rows + n_target, np.int64)
    rows, at, target_at = table[: 8 * n_rows].reshape(n_rows, 8), 0, 8 * n_rows
    for put, first, n in zip(puts, firsts, counts, strict=True):
        of_put = rows[at : at + n]
        of_put[:, 0] = put.blocks[first : first + n]
        of_put[:, 1] = np.arange(first, first + n) * tokens_per_block
        of_put[:, 2:] = put.n_tokens, target_at, put.layer, put.head, put.target_layer, put.target_head
        table[target_at : target_at + len(put.target_blocks)] = put.target_blocks
        at, target_at = at + n, target_at + len(put.target_blocks)
    return table, n_rows
