"""One interface for two KV caches: of the full-attention layers, and of the sliding-window layers."""

from __future__ import annotations

import torch
from torch import Tensor

from mpillm.engine.cache.kv_cache import CachedBlocks, KVCache


class TwoCaches:
    """Implements `transfer.Cache` for the layers of a stage.

    The second cache uses only the window blocks of each sequence (see `WindowBlocks`).
    """

    def __init__(self, caches: tuple[KVCache, KVCache], places: list[tuple[bool, int]]) -> None:
        """`places`: for each layer, whether it is in the second cache, and its index in its cache."""
        self.caches = caches
        self.places = places

    @property
    def pools(self) -> list[Tensor]:
        return [pool for cache in self.caches for pool in cache.pools]

    def piece_bytes(self, n_tokens: int, layers: slice, heads: slice) -> int:
        return self.caches[0].piece_bytes(n_tokens, layers, heads)

    def new_piece(self, cached: CachedBlocks, layers: slice, heads: slice) -> Tensor:
        return self.caches[0].new_piece(cached, layers, heads)

    @torch.inference_mode()
    def read(self, cached: list[CachedBlocks], layers: slice, heads: slice) -> list[Tensor]:
        """Copy as `KVCache.read` does. The content outside the windows is undefined."""
        read = [
            self.caches[windowed].read(_cached_in(cached, windowed), slice(at, at + 1), heads)
            for windowed, at in self.places[layers]
        ]
        return [torch.cat(pieces) for pieces in zip(*read, strict=True)]

    @torch.inference_mode()
    def write(self, cached: list[CachedBlocks], layers: slice, heads: slice, pieces: list[Tensor]) -> None:
        places = self.places[layers]
        for i, (windowed, at) in enumerate(places):
            of_layer = [piece.view(len(places), -1)[i] for piece in pieces]
            self.caches[windowed].write(_cached_in(cached, windowed), slice(at, at + 1), heads, of_layer)


def _cached_in(cached: list[CachedBlocks], windowed: bool) -> list[CachedBlocks]:
    return [blocks._replace(blocks=list(blocks.window_blocks)) for blocks in cached] if windowed else cached
