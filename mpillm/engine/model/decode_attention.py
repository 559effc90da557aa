"""Attention of sequences that add one token, or a few: all together, over the cache's blocks in place.

Such attention reads much and computes little. Gathering each sequence's blocks into a padded batch costs as
much as the attention. So the products run over the blocks in place, as one batched product per step and
layer. Only the scores, which are `head_dim` times smaller than the cache, are gathered into rows per sequence
for the softmax, and then scattered back.

Several rows of a sequence (its last token and draft tokens) are additional rows of the same products, each
with its own mask. Sequences with fewer rows than others repeat their last row.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpillm.engine.cache.kv_cache import KVCache, widened
from mpillm.engine.schedule.block_allocator import NULL_BLOCK
from mpillm.engine.schedule.step import Span

_MAX_UNOWNED = 1.5  # limit for products in place: blocks up to the last, per block that is needed


class Pool(NamedTuple):
    """A layer's keys or values."""

    cached: Tensor  # [blocks, kv_heads, tokens_per_block, head_dim], of the cache's dtype
    scales: Tensor | None  # [kv_heads], see `KVCache`


class PaddedRows(NamedTuple):
    """Several rows of each sequence: B sequences with Q rows each; missing rows repeat the last row."""

    n: int  # Q
    padded: Tensor  # [B * Q] rows of the step
    real_places: Tensor  # where in `padded` the rows `real` are
    real: Tensor


@dataclass(frozen=True)
class DecodePlan:
    """Indices of the products' operands.

    N: blocks read, K: KV heads, H: query heads of all rows of a sequence (by KV head, row, head), B:
    sequences, M: blocks of the longest sequence.
    """

    blocks: Tensor | None  # the N blocks to read; None: the first N, in place
    n_blocks: int
    owner: Tensor  # [N] sequence of each block
    mask: Tensor  # [N * K, 1 or H / K, tokens_per_block]: 0, or -inf where a row does not see a token
    to_rows: Tensor  # [B * H * M] from blocks' scores to sequences' scores
    to_blocks: Tensor  # [N * H] and back
    members: Tensor  # blocks of sequence 0, then of sequence 1, ..., as indices into the N
    starts: Tensor  # [B] where each sequence's blocks begin in `members`
    n_sequences: int
    rows: PaddedRows | None  # None: the step's first B rows, one of each sequence

    @staticmethod
    def of(
        placed: list[tuple[Span, int]],
        tables: Mapping[int, list[int]],
        cache: KVCache,
        n_heads: int,
        dtype: torch.dtype,
        window: int = 0,
    ) -> DecodePlan:
        """`placed`: spans, each with its first row in the step. `tables`, `dtype`: see `StepAttention`.

        `window`: see `LayerKind`.
        """
        spans = [span for span, _ in placed]
        n_kv_heads, size = cache.keys.shape[2:4]
        n, n_rows = len(spans), max(span.n_new for span in spans)
        h = n_heads * n_rows
        # How many tokens each row of a sequence sees.
        last = np.array([span.n_new - 1 for span in spans])
        visible = np.array([[span.n_cached + 1] for span in spans])
        visible = visible + np.minimum(np.arange(n_rows), last[:, None])
        counts = -(-visible[:, -1] // size)
        each = (tables[span.slot][:count] for span, count in zip(spans, counts, strict=True))
        table_blocks = np.fromiter(itertools.chain.from_iterable(each), np.int64)
        # Sequences with a common prefix share blocks: each gets a copy, because here a block has one owner.
        is_shared = np.bincount(table_blocks).max() > 1
        in_place = not is_shared and int(table_blocks.max()) + 1 <= _MAX_UNOWNED * len(table_blocks) + 1
        if in_place:
            members, n_blocks = table_blocks, int(table_blocks.max()) + 1
        else:
            members, n_blocks = np.arange(1, len(table_blocks) + 1), len(table_blocks) + 1
        longest = int(counts.max())
        sequence = np.repeat(np.arange(n), counts)
        starts = np.cumsum(counts) - counts
        column = np.arange(len(table_blocks)) - starts[sequence]
        table = np.full((n, longest), NULL_BLOCK)
        table[sequence, column] = members
        owner, owner_column = np.zeros((2, n_blocks), np.int64)
        owner[members], owner_column[members] = sequence, column
        mask = np.zeros((n_blocks, n_rows, size), np.float32)
        mask[NULL_BLOCK] = -np.inf
        places = column[:, None] * size + np.arange(size)
        ends = visible[sequence][:, :, None]
        sees = places[:, None] < ends
        if window:
            sees &= places[:, None] >= ends - window
        mask[members] = np.where(sees, 0, -np.inf)
        if n_rows > 1:  # one mask for each of a KV head's query heads
            mask = np.repeat(mask, n_heads // n_kv_heads, axis=1)
        heads = np.arange(h)
        to_rows = table[:, None, :] * h + heads[:, None]
        to_blocks = (owner[:, None] * h + heads) * longest + owner_column[:, None]
        return DecodePlan(
            blocks=None if in_place else torch.from_numpy(np.concatenate([[NULL_BLOCK], table_blocks])),
            n_blocks=n_blocks,
            owner=torch.from_numpy(owner),
            mask=torch.from_numpy(np.repeat(mask, n_kv_heads, axis=0)).to(dtype),
            to_rows=torch.from_numpy(to_rows.reshape(-1)),
            to_blocks=torch.from_numpy(to_blocks.reshape(-1)),
            members=torch.from_numpy(members),
            starts=torch.from_numpy(starts),
            n_sequences=n,
            rows=padded_rows(np.array([row for _, row in placed]), last, n_rows) if n_rows > 1 else None,
        )

    def attend(self, q: Tensor, out: Tensor, *pools: Pool, sinks: Tensor | None = None) -> None:
        """Write the attention of `q` [rows, heads, head_dim] to `out` [rows, heads * head_dim].

        `sinks`: see `LayerKind`.
        """
        h, d = q.shape[1:]
        k, size = pools[0].cached.shape[1:3]
        keys, values = (
            widened(
                cached[: self.n_blocks] if self.blocks is None else cached.index_select(0, self.blocks),
                q.dtype,
                scales,
            ).view(-1, size, d)
            for cached, scales in pools
        )
        rows, n = self.rows, self.n_sequences
        if rows is not None:
            q = q.index_select(0, rows.padded).view(n, rows.n, k, h // k, d).transpose(1, 2)
            h *= rows.n
            q = q.reshape(n, h, d)
        queries = q.index_select(0, self.owner).view(self.n_blocks * k, h // k, d)
        scores = torch.baddbmm(self.mask, queries, keys.transpose(1, 2), alpha=d**-0.5)
        weights = scores.view(-1, size).index_select(0, self.to_rows).view(n * h, -1)
        if sinks is None:
            weights = weights.softmax(-1)
        else:  # heads by KV head, row, head
            each = sinks.view(k, 1, -1).expand(k, h // len(sinks), -1).reshape(1, h).expand(n, h)
            weights = torch.cat([weights, each.reshape(-1, 1).to(weights.dtype)], dim=1).softmax(-1)
            weights = weights[:, :-1].contiguous()
        weights = weights.view(-1, size).index_select(0, self.to_blocks).view(self.n_blocks * k, h // k, size)
        parts = torch.bmm(weights, values).view(self.n_blocks, h * d)
        # The sum of each sequence's parts.
        attended = torch.embedding_bag(parts, self.members, self.starts, mode=0)[0]
        if rows is None:
            out[:n] = attended
        else:
            attended = attended.view(n, k, rows.n, -1).transpose(1, 2).reshape(n * rows.n, -1)
            out[rows.real] = attended.index_select(0, rows.real_places)


def padded_rows(first: NDArray[np.int64], last: NDArray[np.int64], n: int) -> PaddedRows:
    """`first`: each sequence's first row in the step; `last`: how many rows follow it."""
    padded = (first[:, None] + np.minimum(np.arange(n), last[:, None])).reshape(-1)
    real_places = np.flatnonzero(np.arange(n) <= last[:, None])
    return PaddedRows(n, *map(torch.from_numpy, (padded, real_places, padded[real_places])))
