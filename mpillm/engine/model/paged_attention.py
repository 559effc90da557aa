"""Attention of one step in place, by kernels that read block tables on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mpillm.engine.cache.kv_cache import KVCache
from mpillm.engine.model.ops import Unscaled


@dataclass(frozen=True)
class PagedAttention:
    """As `transformer.Attention`: `n_decode` rows that add one token, then the rows of tiles.

    The fields are arguments of `kernels`; `tiles`: of sequences without cached tokens, and of others.
    """

    kernels: Any
    cache: KVCache
    n_heads: int
    rotations: Tensor
    table: Tensor
    slots: Tensor
    positions: Tensor
    n_decode: int
    tiles: tuple[Tensor, ...]

    def __call__(self, layer: int, qkv: Tensor | Unscaled) -> Tensor:
        cache, n = self.cache, self.n_decode
        held = cache.keys[layer], cache.values[layer], None if cache.scales is None else cache.scales[layer]
        turned = self.kernels.rotate_store(
            qkv, *held, self.rotations, self.table, self.slots, self.positions, self.n_heads
        )
        out: Tensor = turned.new_empty(len(turned), self.n_heads * turned.shape[2])
        if n:
            rows = self.table, self.slots[:n], self.positions[:n]
            self.kernels.decode_attention(turned[:n], *held, *rows, out[:n], self.n_heads)
        for i, tiles in enumerate(self.tiles):
            if len(tiles):
                self.kernels.context_attention(turned, *held, self.table, tiles, out, self.n_heads, i > 0)
        return out
