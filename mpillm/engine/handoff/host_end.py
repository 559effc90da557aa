"""The host's end of a handoff: whole KV caches in the memory of one rank.

An instance whose partner is another run (`serve --server_role`) hands its caches to its own leader's memory,
or takes them from there, with the same transfers as between instances (`transfer`). In memory a cache has the
bytes that a single rank with the whole model would send in one piece (see `KVCache`), so two servers need not
know each other's layouts or block sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpillm.comms.mover import Mover, Peer
from mpillm.engine.cache.kv_cache import CachedBlocks
from mpillm.engine.handoff.transfers import Transfers
from mpillm.engine.schedule.transfer import Kind, Transfer
from mpillm.engine.shape.layout import RankLayout
from mpillm.engine.shape.model_config import ModelConfig

Cache = NDArray[np.uint8]  # shape [bytes]


class HostPool:
    """Caches by request id, where an instance has blocks: `CachedBlocks.blocks` is the id alone."""

    def __init__(self, config: ModelConfig, kv_bytes_per_token: int, new: Callable[[int], Cache]) -> None:
        """`new`: returns memory of so many bytes."""
        self._shape = config.n_layers, config.kv_parts, config.n_kv_heads
        self._row = kv_bytes_per_token // (config.n_layers * config.kv_parts * config.n_kv_heads)
        self._whole = kv_bytes_per_token
        self._new = new
        self.caches: dict[int, Cache] = {}

    def new(self, n_tokens: int) -> Cache:
        return self._new(n_tokens * self._whole)

    def piece_bytes(self, n_tokens: int, layers: slice, heads: slice) -> int:
        n_parts: int = (layers.stop - layers.start) * self._shape[1] * (heads.stop - heads.start)
        return n_parts * n_tokens * self._row

    def new_piece(self, cached: CachedBlocks, layers: slice, heads: slice) -> Cache:
        """Return the piece's place in the cache, if it lies there as a whole."""
        part = self._part(cached, layers, heads)
        if part.flags.c_contiguous:
            return part.reshape(-1)
        return self._new(self.piece_bytes(cached.n_tokens, layers, heads))

    def read(self, cached: list[CachedBlocks], layers: slice, heads: slice) -> list[Any]:
        return [np.ascontiguousarray(self._part(one, layers, heads)).reshape(-1) for one in cached]

    def write(self, cached: list[CachedBlocks], layers: slice, heads: slice, pieces: list[Any]) -> None:
        for one, piece in zip(cached, pieces, strict=True):
            part = self._part(one, layers, heads)
            if not np.may_share_memory(piece, part):
                part[:] = np.asarray(piece).reshape(part.shape)

    def _part(self, cached: CachedBlocks, layers: slice, heads: slice) -> Cache:
        whole = self.caches[cached.blocks[0]].reshape(*self._shape, cached.n_tokens * self._row)
        return whole[layers, :, heads]


class HostEnd:
    """Takes caches from an instance, or gives them to it. The rank that has the memory polls it."""

    def __init__(
        self,
        config: ModelConfig,
        kv_bytes_per_token: int,
        mover: Mover,
        instance: Peer,
        *,
        takes: bool,
        new: Callable[[int], Cache],
    ) -> None:
        """`instance`: its ranks and layout in the mover's communicator; `takes`: it is a context instance;
        `new`: see `HostPool`.
        """
        self._pool = HostPool(config, kv_bytes_per_token, new)
        self._transfers = Transfers(self._pool, config, RankLayout(), mover, {0: instance}, sends=not takes)
        self._kind = Kind.RECEIVE if takes else Kind.SEND

    def take(self, request_id: int, slot: int, n_tokens: int) -> None:
        """Expect the cache of a request under `slot`."""
        self._start(request_id, slot, n_tokens, self._pool.new(n_tokens))

    def give(self, request_id: int, slot: int, n_tokens: int, cache: Cache) -> None:
        """Send the cache of a request under `slot`, under which the instance expects it."""
        self._start(request_id, slot, n_tokens, cache)

    def poll(self) -> dict[int, Cache]:
        """Return the caches that have arrived, or left, by request."""
        return {id_: self._pool.caches.pop(id_) for id_ in self._transfers.poll()}

    def _start(self, request_id: int, slot: int, n_tokens: int, cache: Cache) -> None:
        self._pool.caches[request_id] = cache
        self._transfers.start([Transfer(self._kind, request_id, 0, slot, n_tokens, [request_id])])
