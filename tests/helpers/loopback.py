"""Movers between ranks that are objects of one process."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mpillm.engine.cache.kv_cache import KVCache
from mpillm.engine.handoff import peer_mover
from mpillm.engine.schedule.engine_messages import PutTarget
from mpillm.engine.tensors.staging import StreamEvent


class Wire:
    """Holds everything that is under way: by source, destination and tag, in order."""

    def __init__(self) -> None:
        self.under_way: dict[tuple[int, int, int], deque[np.ndarray]] = {}
        self.sent: list[tuple[int, int, int, int]] = []  # source, destination, tag, bytes

    def mover(self, rank: int) -> Mover:
        return Mover(self, rank)


class Mover:
    """Stands for `mpillm.comms.mover.Mover` on one rank."""

    min_split_bytes = 0

    def __init__(self, wire: Wire, rank: int) -> None:
        self._wire = wire
        self._rank = rank

    def send(self, rank: int, tag: int, buffer: Any) -> Moving:
        self._wire.under_way.setdefault((self._rank, rank, tag), deque()).append(np.asarray(buffer).copy())
        self._wire.sent.append((self._rank, rank, tag, np.asarray(buffer).nbytes))
        return Moving(None, None)

    def receive(self, rank: int, tag: int, buffer: Any) -> Moving:
        return Moving(self._wire.under_way.setdefault((rank, self._rank, tag), deque()), np.asarray(buffer))

    def poll(self) -> None:
        """Do nothing: what was sent is there."""


@dataclass
class Mark:
    """Stands for an event."""

    over: bool = True

    def query(self) -> bool:
        return self.over


@dataclass
class PeerWire:
    """Both ends of a `peer_mover.Link` between two caches on the CPU."""

    source: KVCache
    dest: KVCache
    is_idle: bool = True  # what both GPUs have to do is done at once
    n_bytes_each: int | None = None  # of a slice; None: its own
    targets_in_flight: list[PutTarget] = field(default_factory=list)
    tags_under_way: list[int] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    puts: list[tuple[list[int], list[StreamEvent]]] = field(default_factory=list)  # tags, what to wait for

    def mark(self) -> Mark:
        self.marks.append(Mark(self.is_idle))
        return self.marks[-1]

    def send_targets(self, targets: list[PutTarget]) -> None:
        self.targets_in_flight += targets

    def targets(self) -> list[PutTarget]:
        targets, self.targets_in_flight = self.targets_in_flight, []
        return targets

    def n_bytes(self, part: peer_mover.CacheSlice) -> int:
        if self.n_bytes_each is not None:
            return self.n_bytes_each
        return self.source.piece_bytes(part.cached.n_tokens, part.layers, part.heads)

    @torch.inference_mode()
    def put(self, parts: list[tuple[peer_mover.CacheSlice, PutTarget]], ready: list[StreamEvent]) -> Mark:
        self.puts.append(([room.tag for _, room in parts], ready))
        for part, room in parts:
            (blocks, n_tokens, _), layers, heads = part
            for a, b in ((self.source.keys, self.dest.keys), (self.source.values, self.dest.values)):
                for i, layer in enumerate(range(*layers.indices(len(a)))):
                    for token in range(n_tokens):
                        block, at = divmod(token, self.source.tokens_per_block)
                        block_there, at_there = divmod(token, self.dest.tokens_per_block)
                        moved = a[layer, blocks[block], heads, at]
                        to = slice(room.head, room.head + len(moved))
                        b[room.layer + i, room.blocks[block_there], to, at_there] = moved
        return self.mark()

    def send_put(self, tags: list[int]) -> None:
        self.tags_under_way += tags

    def arrived(self) -> list[int]:
        tags, self.tags_under_way = self.tags_under_way, []
        return tags


class Moving:
    """Receives with the same source and tag are polled in the order in which they were posted."""

    def __init__(self, queue: deque[np.ndarray] | None, buffer: np.ndarray | None) -> None:
        self._queue = queue
        self._buffer = buffer

    def done(self) -> bool:
        if self._buffer is None:
            return True
        if not self._queue:
            return False
        arrived = self._queue.popleft()
        assert arrived.nbytes == self._buffer.nbytes, "a piece of another size is expected"
        self._buffer[:] = arrived
        self._buffer = None
        return True
