"""Attention of one step: sequences that add one token or a few, all at once, and sequences that add several.

With `CpuKernels` one kernel computes the first kind, and the second up to some length, row by row. Otherwise
the first kind (decode) is in `decode_attention`. Several new tokens (context) go through PyTorch's fused
attention: together, padded to the longest, when they start at position 0 (the causal mask hides the padding
behind them), and one by one when a part of the context is in the cache already.
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

from mpillm.engine.cache.kv_cache import KVCache, rounded, widened
from mpillm.engine.kernels.cpu_kernels import CpuKernels
from mpillm.engine.model.decode_attention import DecodePlan, Pool
from mpillm.engine.step import Span

_MAX_PADDING = 1.25  # padded rows over real ones, for contexts computed together
# Tokens of a context, with those before it, that go to `CpuKernels.attend`: 32 take it a half to a quarter of
# the time of PyTorch's attention, 512 0.6 to 0.95, 1,024 0.8 to 1.4 (two cores of an AMD EPYC with AVX-512);
# with AVX2 64 a half, 512 0.7 to 0.9, 1,024 1.03 to 1.15.
_MOST_BY_ROW = 512


class _Rows(NamedTuple):
    """Arguments of `CpuKernels.attend`."""

    rows: Tensor
    tables: Tensor
    longest: int


class ByRow(NamedTuple):
    """A step of which `CpuKernels` do all: arguments of `rotate_store` and `attend`."""

    rotations: Tensor
    slots: Tensor
    rows: Tensor
    tables: Tensor
    longest: int


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
        kernels: CpuKernels | None = None,
    ) -> None:
        """`spans` in the order of the step's rows, those with one new token first; `tables`: slot -> blocks.

        `rotations`: complex64 [positions, head_dim / 2]. `dtype` is that of queries, keys and values; the
        cache may have another, if there are no `kernels`.
        """
        self._tables = tables
        self._cache = cache
        self._dtype = dtype
        self._n_heads = n_heads
        self._n_kv_heads, self._size, self._head_dim = cache.keys.shape[2:]
        ends = itertools.accumulate(span.n_new for span in spans)
        placed = [(span, end - span.n_new) for span, end in zip(spans, ends, strict=True)]
        self._kernels = kernels
        by_row: list[tuple[Span, int]] = []
        contexts: list[tuple[Span, int]] = []
        for span, row in placed:
            is_short = kernels is not None and span.n_cached + span.n_new <= _MOST_BY_ROW
            (by_row if span.decodes or is_short else contexts).append((span, row))
        self._rows = self._plan_rows(by_row) if by_row and kernels is not None else None
        decodes = bool(by_row) and kernels is None
        self._decode = DecodePlan.of(by_row, tables, cache, n_heads, dtype) if decodes else None
        self._contexts = self._plan_contexts(contexts)
        positions = np.concatenate([np.arange(span.n_cached, span.n_cached + span.n_new) for span in spans])
        blocks = np.concatenate(
            [
                np.repeat(self._blocks_of(span), self._size)[span.n_cached : span.n_cached + span.n_new]
                for span in spans
            ]
        )
        self._rotations = rotations[torch.from_numpy(positions)][:, None]
        self._slots = (torch.from_numpy(blocks), torch.from_numpy(positions % self._size))
        self._places = torch.from_numpy(blocks * self._size + positions % self._size)

    @property
    def by_row(self) -> ByRow | None:
        """The step for one call of all layers, if it has no rows for PyTorch."""
        if self._kernels is None or self._rows is None or self._contexts:
            return None
        return ByRow(self._rotations, self._places, *self._rows)

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """As `transformer.Attention`."""
        h = self._n_heads
        pools = self._pools(layer)
        out = qkv.new_empty(len(qkv), h * self._head_dim)
        if self._kernels is not None:
            held = pools[0].held, pools[1].held
            self._kernels.rotate_store(qkv, self._rotations, self._places, *held)
            if self._rows is not None:
                rows, blocks, longest = self._rows
                self._kernels.attend(qkv, out, *held, rows, blocks, longest)
        else:
            self._rotate_and_store(qkv, pools)
        if self._decode is not None:
            self._decode.attend(qkv[:, :h], out, *pools)
        for context in self._contexts:
            if isinstance(context, _Together):
                out[context.real] = self._attend_together(context, qkv)
            else:
                out[context.start : context.end] = self._attend_behind(
                    context, qkv[context.start : context.end, :h], *pools
                )
        return out

    def _rotate_and_store(self, qkv: Tensor, pools: tuple[Pool, Pool]) -> None:
        h, k = self._n_heads, self._n_kv_heads
        _rotate(qkv[:, : h + k], self._rotations)
        for new, (held, scales) in zip((qkv[:, h : h + k], qkv[:, h + k :]), pools, strict=True):
            numbers = rounded(new, held.dtype, scales)
            held[self._slots[0], :, self._slots[1]] = numbers
            if held.dtype != new.dtype:  # let this step's rows see the same values as later steps
                new.copy_(widened(numbers[:, :, None], new.dtype, scales)[:, :, 0])

    def _pools(self, layer: int) -> tuple[Pool, Pool]:
        """Return the cache's keys and values."""
        scales = self._cache.scales
        return (
            Pool(self._cache.keys[layer], None if scales is None else scales[layer, 0]),
            Pool(self._cache.values[layer], None if scales is None else scales[layer, 1]),
        )

    def _blocks_of(self, span: Span) -> NDArray[np.int64]:
        """Return the blocks that hold the span's tokens and those before them."""
        n_blocks = self._cache.blocks_for(span.n_cached + span.n_new)
        return np.array(self._tables[span.slot][:n_blocks], np.int64)

    def _plan_rows(self, placed: list[tuple[Span, int]]) -> _Rows:
        """`placed`: spans, each with its first row."""
        blocks = [self._blocks_of(span) for span, _ in placed]
        starts = itertools.accumulate((len(some) for some in blocks), initial=0)
        rows = np.concatenate(
            [
                np.array([(row + i, start, span.n_cached + i + 1) for i in range(span.n_new)], np.int64)
                for (span, row), start in zip(placed, starts, strict=False)
            ]
        )
        tables = torch.from_numpy(np.concatenate(blocks))
        return _Rows(torch.from_numpy(rows), tables, int(rows[:, 2].max()))

    # --- several new tokens ---

    def _plan_contexts(self, placed: list[tuple[Span, int]]) -> list[_Together | _Behind]:
        """`placed`: spans, each with its first row."""
        plans: list[_Together | _Behind] = []
        fresh: list[tuple[int, int]] = []  # tokens, first row
        for span, row in placed:
            if span.n_cached == 0:
                fresh.append((span.n_new, row))
            else:
                n = span.n_cached + span.n_new
                visible = torch.arange(n) <= torch.arange(span.n_cached, n)[:, None]
                plans.append(
                    _Behind(row, row + span.n_new, torch.from_numpy(self._blocks_of(span)), n, visible)
                )
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

    def _attend_behind(self, plan: _Behind, q: Tensor, *pools: Pool) -> Tensor:
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
