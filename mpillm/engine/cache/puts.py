"""What goes from one KV cache into the blocks of another, on another GPU: see `handoff.peer_mover`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Put(NamedTuple):
    """What of a sequence goes from one cache to another: from these blocks, layers and heads to those."""

    n_tokens: int
    blocks: list[int]
    there: list[int]
    layer: int  # the first
    head: int
    layer_there: int
    head_there: int


class CacheThere(NamedTuple):
    """A KV cache on another GPU, as this process reaches it."""

    keys: int  # address
    values: int
    n_blocks: int  # with the null block
    n_heads: int
    tokens_per_block: int


def put_table(puts: list[Put], tokens_per_block: int) -> tuple[NDArray[np.int64], int]:
    """Return the table that `handoff_kernels.put_blocks` reads, and its number of rows."""
    counts = [-(-put.n_tokens // tokens_per_block) for put in puts]
    n_rows, n_there = sum(counts), sum(len(put.there) for put in puts)
    table = np.empty(8 * n_rows + n_there, np.int64)
    rows, at, there_at = table[: 8 * n_rows].reshape(n_rows, 8), 0, 8 * n_rows
    for put, n in zip(puts, counts, strict=True):
        of_put = rows[at : at + n]
        of_put[:, 0] = put.blocks[:n]
        of_put[:, 1] = np.arange(0, n * tokens_per_block, tokens_per_block)
        of_put[:, 2:] = put.n_tokens, there_at, *put[3:]
        table[there_at : there_at + len(put.there)] = put.there
        at, there_at = at + n, there_at + len(put.there)
    return table, n_rows
