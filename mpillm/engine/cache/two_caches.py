"""The KV cache of the layers that see all tokens, and that of those with a window, as one."""

from __future__ import annotations

import torch
from torch import Tensor

from mpillm.engine.cache.kv_cache import Held, KVCache


class TwoCaches:
    """Implements `transfer.Cache` for the layers of a stage.

    In the second cache only the window blocks of each sequence count (see `WindowBlocks`).
    """

    def __init__(self, caches: tuple[KVCache, KVCache], places: list[tuple[bool, int]]) -> None:
        """`places`: of each layer, whether it is in the second cache, and where in its cache."""
        self.caches = caches
        self.places = places

    @property
    def pools(self) -> list[Tensor]:
        return [pool for cache in self.caches for pool in cache.pools]

    def piece_bytes(self, n_tokens: int, layers: slice, heads: slice) -> int:
        return self.caches[0].piece_bytes(n_tokens, layers, heads)

    def new_piece(self, held: Held, layers: slice, heads: slice) -> Tensor:
        return self.caches[0].new_piece(held, layers, heads)

    @torch.inference_mode()
    def read(self, held: list[Held], layers: slice, heads: slice) -> list[Tensor]:
        """As `KVCache.read`. What no window reaches is anything."""
        read = [
            self.caches[windowed].read(_held_in(held, windowed), slice(at, at + 1), heads)
            for windowed, at in self.places[layers]
        ]
        return [torch.cat(pieces) for pieces in zip(*read, strict=True)]

    @torch.inference_mode()
    def write(self, held: list[Held], layers: slice, heads: slice, pieces: list[Tensor]) -> None:
        places = self.places[layers]
        for i, (windowed, at) in enumerate(places):
            of_layer = [piece.view(len(places), -1)[i] for piece in pieces]
            self.caches[windowed].write(_held_in(held, windowed), slice(at, at + 1), heads, of_layer)


def _held_in(held: list[Held], windowed: bool) -> list[Held]:
    return [one._replace(blocks=list(one.window_blocks)) for one in held] if windowed else held
