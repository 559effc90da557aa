"""The host's end of a handoff: whole KV caches in the host memory of one rank.

If an instance's partner is in another run (`serve --server_role`), the instance transfers its caches to or
from the memory of its own run's leader. The transfers work as between instances (see `transfers`). In the
leader's memory, a cache has the bytes that a single rank with the whole model would send in one piece (see
`KVCache`). So two servers may have different layouts and block sizes.
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
    """Caches by request id, not in blocks; `CachedBlocks.blocks` contains only the request id."""

    def __init__(self, config: ModelConfig, kv_bytes_per_token: int, new: Callable[[int], Cache]) -> None:
        """`new`: allocates a number of bytes."""
        self._shape = config.n_layers, config.kv_parts, config.n_kv_heads
        self._row = kv_bytes_per_token // (config.n_layers * config.kv_parts * config.n_kv_heads)
        self._token_bytes = kv_bytes_per_token
        self._new = new
        self.caches: dict[int, Cache] = {}

    def new(self, n_tokens: int) -> Cache:
        return self._new(n_tokens * self._token_bytes)

    def piece_bytes(self, n_tokens: int, layers: slice, heads: slice) -> int:
        n_parts: int = (layers.stop - layers.start) * self._shape[1] * (heads.stop - heads.start)
        return n_parts * n_tokens * self._row

    def new_piece(self, cached: CachedBlocks, layers: slice, heads: slice) -> Cache:
        """Return a buffer for a piece; a view of the cache, if the piece is contiguous there."""
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
        cache = self.caches[cached.blocks[0]].reshape(*self._shape, cached.n_tokens * self._row)
        return cache[layers, :, heads]


class HostEnd:
    """Receives caches from an instance, or sends caches to it. The rank with the memory calls `poll`."""

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
        """
        Args:
            instance: The instance's ranks and layout in the mover's communicator.
            takes: True for a context instance.
            new: See `HostPool`.
        """
        self._pool = HostPool(config, kv_bytes_per_token, new)
        self._transfers = Transfers(self._pool, config, RankLayout(), mover, {0: instance}, sends=not takes)
        self._kind = Kind.RECEIVE if takes else Kind.SEND

    def take(self, request_id: int, slot: int, n_tokens: int) -> None:
        """Expect the cache of a request under `slot`."""
        self._start(request_id, slot, n_tokens, self._pool.new(n_tokens))

    def give(self, request_id: int, slot: int, n_tokens: int, cache: Cache) -> None:
        """Send the cache of a request under the `slot` under which the instance expects it."""
        self._start(request_id, slot, n_tokens, cache)

    def poll(self) -> dict[int, Cache]:
        """Return the completely transferred caches by request."""
        return {id_: self._pool.caches.pop(id_) for id_ in self._transfers.poll()}

    def _start(self, request_id: int, slot: int, n_tokens: int, cache: Cache) -> None:
        self._pool.caches[request_id] = cache
        self._transfers.start([Transfer(self._kind, request_id, 0, slot, n_tokens, [request_id])])
