"""Attention of one step in place, by kernels that read block tables on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from mpillm.engine.kernels.ops import UnscaledProduct
from mpillm.engine.model.context_plan import ContextPlan
from mpillm.engine.model.step_parts import LayerKind


class LayerCache(NamedTuple):
    """A layer's keys and values, with their scales in fp8, and the blocks of each slot: see `kernels`."""

    keys: Tensor
    values: Tensor
    scales: Tensor | None
    table: Tensor


@dataclass(frozen=True)
class Contexts:
    """A step's `ContextPlan`, and its arrays on the device."""

    plan: ContextPlan
    fresh: Tensor
    copied: Tensor
    in_blocks: Tensor
    copies: Tensor


@dataclass(frozen=True)
class PagedAttention:
    """Implements `step_parts.Attention`: `n_decode` rows that add one token, then rows of contexts.

    The other fields are arguments of `kernels`.
    """

    kernels: Any
    caches: Sequence[LayerCache]
    n_heads: int
    rotations: Tensor
    slots: Tensor
    positions: Tensor
    n_decode: int
    contexts: Contexts | None
    kinds: Sequence[LayerKind]  # of the layers
    fp8_contexts: bool = False  # contexts with copied rows are multiplied in fp8

    def __call__(self, layer: int, qkv: Tensor | UnscaledProduct) -> Tensor:
        turned = self.store(layer, qkv)
        out = turned.new_empty(len(turned), self.n_heads * turned.shape[2])
        self.attend(layer, turned, out)
        return out

    def store(self, layer: int, qkv: Tensor | UnscaledProduct, out: Tensor | None = None) -> Tensor:
        """See `step_kernels.rotate_store`."""
        *caches, table = self.caches[layer]
        rotations = self.rotations
        if first := self.kinds[layer].first_rotation:
            rotations = rotations[first:]
        turned: Tensor = self.kernels.rotate_store(
            qkv, *caches, rotations, table, self.slots, self.positions, self.n_heads, out
        )
        return turned

    def attend(self, layer: int, turned: Tensor, out: Tensor) -> None:
        """Attend with `turned`, the result of `store`: out [rows, heads * head_dim]."""
        caches, n, kind = self.caches[layer], self.n_decode, self.kinds[layer]
        if n:
            rows = self.slots[:n], self.positions[:n]
            self.kernels.decode_attention(
                turned[:n], *caches, *rows, out[:n], self.n_heads, kind.window, kind.sinks, kind.rank
            )
        if self.contexts is not None:
            self._attend_with_contexts(self.contexts, turned, caches, out, kind)

    def _attend_with_contexts(
        self, contexts: Contexts, qkv: Tensor, caches: LayerCache, out: Tensor, kind: LayerKind
    ) -> None:
        keys, values, scales, table = caches
        plan, copied, tile_groups = contexts.plan, None, [(contexts.fresh, False), (contexts.in_blocks, True)]
        if self.fp8_contexts and not kind.window and kind.sinks is None and len(contexts.copies):
            self.kernels.fp8_context_attention(
                *(qkv, keys, values, scales, table, contexts.copies, plan.n_copied, plan.longest),
                *(contexts.copied, out, self.n_heads),
            )
        elif len(contexts.copies):
            copied = self.kernels.copied_rows(
                keys, values, table, contexts.copies, plan.n_copied, plan.longest, qkv.dtype
            )
            tile_groups.append((contexts.copied, False))
        for tiles, reads_blocks in tile_groups:
            if len(tiles):
                self.kernels.context_attention(
                    *(qkv, copied if tiles is contexts.copied else None, *caches, tiles, out, self.n_heads),
                    reads_blocks,
                    kind.window,
                    kind.sinks,
                    kind.rank,
                )
