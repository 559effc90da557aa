"""Attention of one step: sequences that add one token, all at once, and sequences that add several.

One new token (decode) reads much and computes little. Gathering each sequence's blocks into a padded batch
costs as much as the attention. So the products run over the blocks in place, as one batched product per step
and layer; only the scores, `head_dim` times smaller than the cache, are gathered into rows per sequence for
the softmax, and back.

Several new tokens (context) go through PyTorch's fused attention: together, padded to the longest, when they
start at position 0 (the causal mask hides the padding behind them), and one by one when a part of the context
is in the cache already.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from mpillm.engine.cache.kv_cache import NULL_BLOCK, KVCache, rounded, widened
from mpillm.engine.step import Span

_MAX_PADDING = 1.25  # padded rows over real ones, for contexts computed together
_MAX_UNOWNED = 1.5  # blocks from the first to the last over blocks wanted, for products in place


class _Pool(NamedTuple):
    """A layer's keys or values."""

    held: Tensor  # [blocks, kv_heads, tokens_per_block, head_dim], of the cache's dtype
    scales: Tensor | None  # [kv_heads], see `KVCache`


@dataclass(frozen=True)
class _Decode:
    """Indices of decode's operands.

    N: blocks read, H: query heads, B: sequences, M: blocks of the longest.
    """

    blocks: Tensor | None  # the N blocks to read; None: the first N, in place
    n_blocks: int
    owner: Tensor  # [N] sequence of each block
    mask: Tensor  # [N * kv_heads, 1, tokens_per_block]: 0, or -inf after the end of a sequence
    to_rows: Tensor  # [B * H * M] from blocks' scores to sequences' scores
    to_blocks: Tensor  # [N * H] and back
    members: Tensor  # blocks of sequence 0, then of sequence 1, ..., as indices into the N
    starts: Tensor  # [B] where each sequence's blocks begin in `members`
    n_sequences: int


@dataclass(frozen=True)
class _Together:
    """`n` contexts from position 0; their tokens are the step's rows `real`."""

    n: int
    padded: Tensor  # [n * longest] rows of the step: each context's, padded with its first
    kept: Tensor  # where in `padded` the rows `real` are
    real: Tensor


@dataclass(frozen=True)
class _Behind:
    """A context after cached tokens: rows [start, end) of the step attend to `n_tokens` tokens in `blocks`.

    `mask`: [rows, n_tokens].
    """

    start: int
    end: int
    blocks: Tensor
    n_tokens: int
    mask: Tensor


class StepAttention:
    """What all layers of a step share: made once per step, called once per layer."""

    def __init__(
        self,
        spans: list[Span],
        tables: Mapping[int, list[int]],
        cache: KVCache,
        n_heads: int,
        rotations: Tensor,
        dtype: torch.dtype,
    ) -> None:
        """`spans` in the order of the step's rows, those with one new token first; `tables`: slot -> blocks.

        `rotations`: complex64 [positions, head_dim / 2]. `dtype` is that of queries, keys and values; the
        cache may have another.
        """
        self._tables = tables
        self._cache = cache
        self._dtype = dtype
        self._n_heads = n_heads
        self._n_kv_heads, self._size, self._head_dim = cache.keys.shape[2:]
        n_decode = sum(span.n_new == 1 for span in spans)
        self._decode = self._plan_decode(spans[:n_decode]) if n_decode else None
        self._contexts = self._plan_contexts(spans[n_decode:], n_decode)
        positions = np.concatenate([np.arange(span.n_cached, span.n_cached + span.n_new) for span in spans])
        blocks = np.concatenate(
            [
                np.repeat(self._blocks_of(span), self._size)[span.n_cached : span.n_cached + span.n_new]
                for span in spans
            ]
        )
        self._rotations = rotations[torch.from_numpy(positions)][:, None]
        self._slots = (torch.from_numpy(blocks), torch.from_numpy(positions % self._size))

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """As `transformer.Attention`."""
        h, k = self._n_heads, self._n_kv_heads
        _rotate(qkv[:, : h + k], self._rotations)
        pools = self._pools(layer)
        for new, (held, scales) in zip((qkv[:, h : h + k], qkv[:, h + k :]), pools, strict=True):
            numbers = rounded(new, held.dtype, scales)
            held[self._slots[0], :, self._slots[1]] = numbers
            if held.dtype != new.dtype:  # let this step's rows see the same values as later steps
                new.copy_(widened(numbers[:, :, None], new.dtype, scales)[:, :, 0])
        out = qkv.new_empty(len(qkv), h * self._head_dim)
        if self._decode is not None:
            n = self._decode.n_sequences
            out[:n] = self._attend_decode(self._decode, qkv[:n, :h], *pools)
        for context in self._contexts:
            if isinstance(context, _Together):
                out[context.real] = self._attend_together(context, qkv)
            else:
                out[context.start : context.end] = self._attend_behind(
                    context, qkv[context.start : context.end, :h], *pools
                )
        return out

    def _pools(self, layer: int) -> tuple[_Pool, _Pool]:
        """Return the cache's keys and values."""
        scales = self._cache.scales
        return (
            _Pool(self._cache.keys[layer], None if scales is None else scales[layer, 0]),
            _Pool(self._cache.values[layer], None if scales is None else scales[layer, 1]),
        )

    def _blocks_of(self, span: Span) -> NDArray[np.int64]:
        """Return the blocks that hold the span's tokens and those before them."""
        n_blocks = self._cache.blocks_for(span.n_cached + span.n_new)
        return np.array(self._tables[span.slot][:n_blocks], np.int64)

    # --- one new token ---

    def _plan_decode(self, spans: list[Span]) -> _Decode:
        h, size, n = self._n_heads, self._size, len(spans)
        lengths = np.array([span.n_cached + 1 for span in spans])
        counts = -(-lengths // size)
        wanted = np.fromiter(
            itertools.chain.from_iterable(
                self._tables[span.slot][:c] for span, c in zip(spans, counts, strict=True)
            ),
            np.int64,
        )
        # Sequences with a common prefix share blocks: each gets a copy, because here a block has one owner.
        is_shared = np.bincount(wanted).max() > 1
        in_place = not is_shared and int(wanted.max()) + 1 <= _MAX_UNOWNED * len(wanted) + 1
        if in_place:
            members, n_blocks = wanted, int(wanted.max()) + 1
        else:
            members, n_blocks = np.arange(1, len(wanted) + 1), len(wanted) + 1
        longest = int(counts.max())
        sequence = np.repeat(np.arange(n), counts)
        starts = np.cumsum(counts) - counts
        column = np.arange(len(wanted)) - starts[sequence]
        table = np.full((n, longest), NULL_BLOCK)
        table[sequence, column] = members
        owner, owner_column = np.zeros((2, n_blocks), np.int64)
        owner[members], owner_column[members] = sequence, column
        mask = np.zeros((n_blocks, size), np.float32)
        mask[NULL_BLOCK] = -np.inf
        mask[members] = np.where(
            column[:, None] * size + np.arange(size) < lengths[sequence][:, None], 0, -np.inf
        )
        heads = np.arange(h)
        to_rows = table[:, None, :] * h + heads[:, None]
        to_blocks = (owner[:, None] * h + heads) * longest + owner_column[:, None]
        return _Decode(
            blocks=None if in_place else torch.from_numpy(np.concatenate([[NULL_BLOCK], wanted])),
            n_blocks=n_blocks,
            owner=torch.from_numpy(owner),
            mask=torch.from_numpy(np.repeat(mask, self._n_kv_heads, axis=0)[:, None]).to(self._dtype),
            to_rows=torch.from_numpy(to_rows.reshape(-1)),
            to_blocks=torch.from_numpy(to_blocks.reshape(-1)),
            members=torch.from_numpy(members),
            starts=torch.from_numpy(starts),
            n_sequences=n,
        )

    def _attend_decode(self, plan: _Decode, q: Tensor, *pools: _Pool) -> Tensor:
        h, k, d, size = self._n_heads, self._n_kv_heads, self._head_dim, self._size
        keys, values = (
            widened(
                held[: plan.n_blocks] if plan.blocks is None else held.index_select(0, plan.blocks),
                q.dtype,
                scales,
            ).view(-1, size, d)
            for held, scales in pools
        )
        queries = q.index_select(0, plan.owner).view(plan.n_blocks * k, h // k, d)
        scores = torch.baddbmm(plan.mask, queries, keys.transpose(1, 2), alpha=d**-0.5)
        rows = scores.view(-1, size).index_select(0, plan.to_rows).view(plan.n_sequences * h, -1).softmax(-1)
        weights = rows.view(-1, size).index_select(0, plan.to_blocks).view(plan.n_blocks * k, h // k, size)
        parts = torch.bmm(weights, values).view(plan.n_blocks, h * d)
        # The sum of each sequence's parts.
        return torch.embedding_bag(parts, plan.members, plan.starts, mode=0)[0]

    # --- several new tokens ---

    def _plan_contexts(self, spans: list[Span], first_row: int) -> list[_Together | _Behind]:
        plans: list[_Together | _Behind] = []
        fresh: list[tuple[int, int]] = []  # tokens, first row
        row = first_row
        for span in spans:
            if span.n_cached == 0:
                fresh.append((span.n_new, row))
            else:
                n = span.n_cached + span.n_new
                visible = torch.arange(n) <= torch.arange(span.n_cached, n)[:, None]
                plans.append(
                    _Behind(row, row + span.n_new, torch.from_numpy(self._blocks_of(span)), n, visible)
                )
            row += span.n_new
        fresh.sort(reverse=True)
        while fresh:
            longest, n, real = fresh[0][0], 0, 0
            while n < len(fresh) and longest * (n + 1) <= _MAX_PADDING * (real + fresh[n][0]):
                real += fresh[n][0]
                n += 1
            lengths, starts = np.array(fresh[:n]).T[:, :, None]
            columns = np.arange(longest)
            is_real = columns < lengths
            padded = np.where(is_real, starts + columns, starts).reshape(-1)
            kept = np.flatnonzero(is_real)
            plans.append(
                _Together(n, torch.from_numpy(padded), torch.from_numpy(kept), torch.from_numpy(padded[kept]))
            )
            fresh = fresh[n:]
        return plans

    def _attend_together(self, plan: _Together, qkv: Tensor) -> Tensor:
        h, k = self._n_heads, self._n_kv_heads
        padded = qkv.index_select(0, plan.padded).view(plan.n, -1, h + 2 * k, self._head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            padded[:, :h], padded[:, h : h + k], padded[:, h + k :], is_causal=True, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(len(plan.padded), -1).index_select(0, plan.kept)

    def _attend_behind(self, plan: _Behind, q: Tensor, *pools: _Pool) -> Tensor:
        seen = (widened(held.index_select(0, plan.blocks), q.dtype, scales) for held, scales in pools)
        keys, values = (
            x.transpose(0, 1).reshape(1, self._n_kv_heads, -1, self._head_dim)[:, :, : plan.n_tokens]
            for x in seen
        )
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys, values, attn_mask=plan.mask, enable_gqa=True
        )
        return out[0].transpose(0, 1).reshape(len(q), -1)


def _rotate(x: Tensor, rotations: Tensor) -> None:
    """Rotate x's pairs in place: x [rows, heads, head_dim], rotations [rows, 1, head_dim / 2] (complex64)."""
    if x.dtype == torch.float32:
        torch.view_as_complex(x.view(*x.shape[:2], -1, 2)).mul_(rotations)
    else:
        turned = torch.view_as_complex(x.float().view(*x.shape[:2], -1, 2)).mul_(rotations)
        x.copy_(torch.view_as_real(turned).view(x.shape))
