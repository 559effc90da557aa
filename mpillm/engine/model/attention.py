"""Attention of one step: of decoding sequences, which add one token or a few, and of contexts.

With `CpuKernels`, one kernel computes decoding sequences and short contexts, row by row. Otherwise,
`decode_attention` computes decoding sequences. The other contexts go through PyTorch's fused attention.
Contexts that start at position 0 run together, padded to the longest; the causal mask hides the padding. A
context whose first part is in the cache runs alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from mpillm.engine.cache.kv_cache import KVCache, rounded, widened
from mpillm.engine.kernels.cpu_kernels import CpuKernels
from mpillm.engine.model.decode_attention import DecodePlan, PaddedRows, Pool, padded_rows
from mpillm.engine.model.step_parts import PLAIN, LayerKind
from mpillm.engine.schedule.step import Span

_MAX_PADDING = 1.25  # padded rows over real ones, for contexts computed together
# Longest context, with its cached tokens, that goes to `CpuKernels.attend`. Its time over that of PyTorch's
# attention, on two cores of an AMD EPYC with AVX-512: a half to a quarter with 32 tokens, 0.6 to 0.95 with
# 512, 0.8 to 1.4 with 1,024. With AVX2: a half with 64 tokens, 0.7 to 0.9 with 512, 1.03 to 1.15 with 1,024.
_MAX_BY_ROW = 512
_MAX_SCORES = 1 << 24  # in memory at a time


class _Rows(NamedTuple):
    """Arguments of `CpuKernels.attend`."""

    rows: Tensor
    tables: Tensor
    longest: int


class ByRow(NamedTuple):
    """A step that `CpuKernels` compute completely: arguments of `rotate_store` and `attend`."""

    rotations: Tensor
    slots: Tensor
    rows: Tensor
    tables: Tensor
    longest: int


@dataclass(frozen=True)
class _PartialContext:
    """Rows [start, end) of the step attend to `n_tokens` tokens in `blocks`.

    `mask`: [rows, n_tokens].
    """

    start: int
    end: int
    blocks: Tensor
    n_tokens: int
    mask: Tensor


class _Plan(NamedTuple):
    """How layers with the same window attend."""

    rows: _Rows | None
    decode: DecodePlan | None
    contexts: list[PaddedRows | _PartialContext]  # `PaddedRows`: from position 0


class StepAttention:
    """Attention of all layers of a step: made once per step, called once per layer."""

    def __init__(
        self,
        spans: list[Span],
        tables: Mapping[int, list[int]],
        cache: KVCache,
        n_heads: int,
        rotations: Tensor,
        dtype: torch.dtype,
        kernels: CpuKernels | None = None,
        kinds: Sequence[LayerKind] | None = None,
    ) -> None:
        """`spans` in the order of the step's rows, those with one new token first; `tables`: slot -> blocks.

        `rotations`: complex64 [positions, head_dim / 2]. `dtype`: of queries, keys and values; without
        `kernels`, the cache may have another dtype. `kinds`: of the layers; None: all are `PLAIN`.
        """
        self._tables = tables
        self._cache = cache
        self._dtype = dtype
        self._n_heads = n_heads
        self._n_kv_heads, self._size, self._head_dim = cache.keys.shape[2:]
        ends = itertools.accumulate(span.n_new for span in spans)
        self._placed = [(span, end - span.n_new) for span, end in zip(spans, ends, strict=True)]
        self._kernels = kernels
        self._kinds = kinds
        self._longest = max(span.n_cached + span.n_new for span in spans)
        self._plans: dict[tuple[int, bool], _Plan] = {}  # by window, and whether there are sinks
        positions = np.concatenate([np.arange(span.n_cached, span.n_cached + span.n_new) for span in spans])
        each = (np.repeat(self._blocks_of(s), self._size)[s.n_cached : s.n_cached + s.n_new] for s in spans)
        blocks = np.concatenate([*each])
        self.positions, self._table = torch.from_numpy(positions), rotations
        self._rotations: dict[int, Tensor] = {}  # of the rows, by `LayerKind.first_rotation`
        self._slots = (torch.from_numpy(blocks), torch.from_numpy(positions % self._size))
        self._places = torch.from_numpy(blocks * self._size + positions % self._size)

    @property
    def by_row(self) -> ByRow | None:
        """The step as arguments of one call for all layers; None if it has rows for PyTorch."""
        plan = self._plan(PLAIN)
        if self._kernels is None or plan.rows is None or plan.contexts:
            return None
        return ByRow(self._turns(PLAIN), self._places, *plan.rows)

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """Compute a layer's attention (see `step_parts.Attention`)."""
        h, kind = self._n_heads, PLAIN if self._kinds is None else self._kinds[layer]
        plan, rotations = self._plan(kind), self._turns(kind)
        pools = self._pools(layer)
        out = qkv.new_empty(len(qkv), h * self._head_dim)
        if self._kernels is not None:
            cached = pools[0].cached, pools[1].cached
            self._kernels.rotate_store(qkv, rotations, self._places, *cached)
            if plan.rows is not None:
                rows, blocks, longest = plan.rows
                self._kernels.attend(qkv, out, *cached, rows, blocks, longest, kind.sinks)
        else:
            self._rotate_and_store(qkv, rotations, pools)
        if plan.decode is not None:
            plan.decode.attend(qkv[:, :h], out, *pools, sinks=kind.sinks)
        for context in plan.contexts:
            if isinstance(context, PaddedRows):
                out[context.real] = self._attend_together(context, qkv)
            else:
                own = slice(context.start, context.end)
                out[own] = self._attend_behind(context, qkv[own, :h], *pools, sinks=kind.sinks)
        return out

    def _plan(self, kind: LayerKind) -> _Plan:
        """Return the plan of a layer, which is made for the first layer of its kind."""
        window = kind.window if kind.window < self._longest else 0  # 0: no sequence of the step is longer
        key = window, kind.sinks is not None
        if key not in self._plans:
            self._plans[key] = self._planned(*key)
        return self._plans[key]

    def _planned(self, window: int, sinks: bool) -> _Plan:
        kernels = self._kernels
        by_row: list[tuple[Span, int]] = []
        contexts: list[tuple[Span, int]] = []
        for span, row in self._placed:
            # PyTorch's attention has neither windows nor sinks.
            is_short = window or sinks or span.n_cached + span.n_new <= _MAX_BY_ROW
            takes_rows = span.decodes or (kernels is not None and is_short)
            (by_row if takes_rows else contexts).append((span, row))
        rows = self._plan_rows(by_row, window) if by_row and kernels is not None else None
        decode = None
        if by_row and kernels is None:
            decode = DecodePlan.of(by_row, self._tables, self._cache, self._n_heads, self._dtype, window)
        return _Plan(rows, decode, self._plan_contexts(contexts, window, sinks))

    def _turns(self, kind: LayerKind) -> Tensor:
        """Return the rows' rotations in a layer: complex64 [rows, 1, head_dim / 2]."""
        first = kind.first_rotation
        if first not in self._rotations:
            self._rotations[first] = self._table[self.positions + first][:, None]
        return self._rotations[first]

    def _rotate_and_store(self, qkv: Tensor, rotations: Tensor, pools: tuple[Pool, Pool]) -> None:
        h, k = self._n_heads, self._n_kv_heads
        _rotate(qkv[:, : h + k], rotations)
        for new, (cached, scales) in zip((qkv[:, h : h + k], qkv[:, h + k :]), pools, strict=True):
            numbers = rounded(new, cached.dtype, scales)
            if cached is pools[0].cached or len(self._cache.pools) == 2:
                cached[self._slots[0], :, self._slots[1]] = numbers
            if cached.dtype != new.dtype:  # let this step's rows see the same values as later steps
                new.copy_(widened(numbers[:, :, None], new.dtype, scales)[:, :, 0])

    def _pools(self, layer: int) -> tuple[Pool, Pool]:
        """Return a layer's keys and values in the cache."""
        scales = self._cache.scales
        return (
            Pool(self._cache.keys[layer], None if scales is None else scales[layer, 0]),
            Pool(self._cache.values[layer], None if scales is None else scales[layer, 1]),
        )

    def _blocks_of(self, span: Span) -> NDArray[np.int64]:
        """Return the blocks that hold the span's tokens and those before them."""
        n_blocks = self._cache.blocks_for(span.n_cached + span.n_new)
        return np.array(self._tables[span.slot][:n_blocks], np.int64)

    def _plan_rows(self, placed: list[tuple[Span, int]], window: int) -> _Rows:
        """`placed`: spans, each with its first row."""
        blocks = [self._blocks_of(span) for span, _ in placed]
        starts = itertools.accumulate((len(some) for some in blocks), initial=0)
        rows = np.concatenate(
            [
                np.array([(row + i, start, 0, span.n_cached + i + 1) for i in range(span.n_new)], np.int64)
                for (span, row), start in zip(placed, starts, strict=False)
            ]
        )
        if window:
            rows[:, 2] = np.maximum(rows[:, 3] - window, 0)
        tables = torch.from_numpy(np.concatenate(blocks))
        return _Rows(torch.from_numpy(rows), tables, int(rows[:, 3].max()))

    # --- several new tokens ---

    def _plan_contexts(
        self, placed: list[tuple[Span, int]], window: int, sinks: bool
    ) -> list[PaddedRows | _PartialContext]:
        """`placed`: spans, each with its first row."""
        plans: list[PaddedRows | _PartialContext] = []
        fresh: list[tuple[int, int]] = []  # tokens, first row
        for span, row in placed:
            if span.n_cached == 0 and not (window or sinks):
                fresh.append((span.n_new, row))
            else:
                n = span.n_cached + span.n_new
                token, position = torch.arange(n), torch.arange(span.n_cached, n)[:, None]
                visible = token <= position
                if window:
                    visible &= token > position - window
                blocks = torch.from_numpy(self._blocks_of(span))
                plans.append(_PartialContext(row, row + span.n_new, blocks, n, visible))
        fresh.sort(reverse=True)
        while fresh:
            longest, n, real = fresh[0][0], 0, 0
            while n < len(fresh) and longest * (n + 1) <= _MAX_PADDING * (real + fresh[n][0]):
                real += fresh[n][0]
                n += 1
            lengths, starts = np.array(fresh[:n]).T
            plans.append(padded_rows(starts, lengths - 1, longest))
            fresh = fresh[n:]
        return plans

    def _attend_together(self, plan: PaddedRows, qkv: Tensor) -> Tensor:
        h, k = self._n_heads, self._n_kv_heads
        padded = qkv.index_select(0, plan.padded).view(-1, plan.n, h + 2 * k, self._head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            padded[:, :h], padded[:, h : h + k], padded[:, h + k :], is_causal=True, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(len(plan.padded), -1).index_select(0, plan.real_places)

    def _attend_behind(
        self, plan: _PartialContext, q: Tensor, *pools: Pool, sinks: Tensor | None = None
    ) -> Tensor:
        seen = (widened(cached.index_select(0, plan.blocks), q.dtype, scales) for cached, scales in pools)
        keys, values = (
            x.transpose(0, 1).reshape(1, self._n_kv_heads, -1, self._head_dim)[:, :, : plan.n_tokens]
            for x in seen
        )
        queries = q.transpose(0, 1)[None]
        if sinks is not None:
            return _with_sinks(queries, keys, values, plan.mask, sinks)
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=plan.mask, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(len(q), -1)


def _with_sinks(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    """Attend with q [1, heads, rows, head_dim] under `mask` [rows, tokens]: [rows, heads * head_dim].

    A sink is one more token, whose key and value are zero and whose score is in the mask.
    """
    keys, values = (F.pad(x, (0, 0, 0, 1)) for x in (keys, values))
    h, n = q.shape[1], mask.shape[1]
    pieces, at_once = [], max(1, _MAX_SCORES // (h * n))
    for first in range(0, len(mask), at_once):
        some, seen = q[:, :, first : first + at_once], mask[first : first + at_once]
        scores = q.new_zeros(h, len(seen), n + 1)
        scores[:, :, :n].masked_fill_(~seen, -torch.inf)
        scores[:, :, n] = sinks[:, None]
        out = F.scaled_dot_product_attention(some, keys, values, attn_mask=scores[None], enable_gqa=True)
        pieces.append(out)
    return torch.cat(pieces, dim=2)[0].transpose(0, 1).reshape(len(mask), -1)


def _rotate(x: Tensor, rotations: Tensor) -> None:
    """Rotate x's pairs in place: x [rows, heads, head_dim], rotations [rows, 1, head_dim / 2] (complex64)."""
    if x.dtype == torch.float32:
        torch.view_as_complex(x.view(*x.shape[:2], -1, 2)).mul_(rotations)
    else:
        turned = torch.view_as_complex(x.float().view(*x.shape[:2], -1, 2)).mul_(rotations)
        x.copy_(torch.view_as_real(turned).view(x.shape))
