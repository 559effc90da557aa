"""A route communicator of ranks that are objects of one process.

Messages of one pair of ranks keep their order, and no others do.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

from mpillm.comms.tags import Tag
from mpillm.comms.transport import Buffer, Envelope


class Route:
    """Is to the roles of a rank what a `Transport` on the route is."""

    def __init__(self, network: Network, rank: int) -> None:
        self._network = network
        self.rank = rank
        self.handlers: dict[Tag, Callable[[Envelope], None]] = {}

    def send(self, dest: int, tag: Tag, buffer: Buffer) -> None:
        if (self.rank, dest) in self._network.forgotten:
            return
        self._network.under_way.setdefault((self.rank, dest), deque()).append(
            Envelope(self.rank, tag, buffer)
        )


class Network:
    """Delivers one message at a time, of a pair of ranks that `chance` chooses."""

    def __init__(self, n_ranks: int, chance: random.Random) -> None:
        self.under_way: dict[tuple[int, int], deque[Envelope]] = {}
        self.chance = chance
        self.routes: list[Any] = [Route(self, rank) for rank in range(n_ranks)]
        self.forgotten: set[tuple[int, int]] = set()  # who has, and whom

    def forget(self, rank: int, lost: int) -> None:
        """From now on `rank` sends nothing to `lost`, and takes nothing from it."""
        self.forgotten |= {(rank, lost), (lost, rank)}
        for pair in ((rank, lost), (lost, rank)):
            self.under_way.pop(pair, None)

    def deliver(self) -> bool:
        """Return whether there was a message."""
        pairs = [pair for pair, messages in self.under_way.items() if messages]
        if not pairs:
            return False
        pair = self.chance.choice(pairs)
        message = self.under_way[pair].popleft()
        self.routes[pair[1]].handlers[message.tag](message)
        return True
