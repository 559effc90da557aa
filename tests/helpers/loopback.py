"""A mover between ranks that are objects of one process."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np


class Wire:
    """Holds everything that is under way: by source, destination and tag, in order."""

    def __init__(self) -> None:
        self.under_way: dict[tuple[int, int, int], deque[np.ndarray]] = {}
        self.sent: list[tuple[int, int, int, int]] = []  # source, destination, tag, bytes

    def mover(self, rank: int) -> Mover:
        return Mover(self, rank)


class Mover:
    """Stands for `mpillm.comms.mover.Mover` on one rank."""

    whole_below = 0

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
