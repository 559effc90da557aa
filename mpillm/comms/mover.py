"""Movers: they transfer KV caches between ranks, without waiting.

On GPUs, movers of `engine.handoff` replace `MpiMover`. The sequence of transfers stays the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from mpi4py import MPI

from mpillm.comms.transport import is_loss


class Peer(NamedTuple):
    """The instance at the other end of a handoff.

    Its ranks are consecutive in the handoff communicator, `tp_rank` varying fastest.
    """

    rank: int  # its root rank, in the handoff communicator
    tp_size: int
    pp_size: int


class TransferHandle(Protocol):
    """A transfer in progress."""

    def done(self) -> bool:
        """Return whether the transfer is complete."""
        ...


class Mover(Protocol):
    """Sends and receives buffers. Buffers between two ranks with the same tag arrive in the order sent."""

    min_split_bytes: int  # a smaller transfer is faster in one piece than in several

    def send(self, rank: int, tag: int, buffer: Any) -> TransferHandle:
        """Send `buffer` to `rank` of the handoff communicator. It must not change during the transfer."""
        ...

    def receive(self, rank: int, tag: int, buffer: Any) -> TransferHandle:
        """Fill `buffer` from `rank`, which sends as many bytes."""
        ...

    def poll(self) -> None:
        """Make progress; call this before `TransferHandle.done`."""
        ...


class BlockMover(Protocol):
    """Transfers parts of KV caches between blocks, without buffers."""

    ranks: frozenset[int]  # ranks of the handoff communicator that this mover reaches

    def move(self, rank: int, tag: int, cached: Any, layers: slice, heads: slice) -> TransferHandle:
        """Send or receive some layers and heads of cached blocks.

        The next `poll` starts the transfer, after the work that this rank has launched so far.
        """
        ...

    def poll(self) -> None:
        """Make progress; call this also after `move`."""
        ...


class MpiMover:
    """Transfers memory that NumPy can address, over MPI."""

    min_split_bytes = 0

    def __init__(self, comm: MPI.Intracomm, *, outlives_others: bool = False) -> None:
        """`comm`: the handoff communicator. No other code may receive in it with ANY_SOURCE or ANY_TAG.

        `outlives_others`: transfers from and to a lost rank remain incomplete, without an error.
        """
        self.comm = comm
        self._outlives_others = outlives_others

    def send(self, rank: int, tag: int, buffer: Any) -> TransferHandle:
        return self._start(lambda: self.comm.Isend((np.asarray(buffer), MPI.BYTE), rank, tag))

    def receive(self, rank: int, tag: int, buffer: Any) -> TransferHandle:
        return self._start(lambda: self.comm.Irecv((np.asarray(buffer), MPI.BYTE), rank, tag))

    def _start(self, start: Callable[[], MPI.Request]) -> TransferHandle:
        transfer = _MpiTransfer(self._outlives_others)
        transfer.attempt(start)
        return transfer

    def poll(self) -> None:
        """Do nothing: MPI makes progress whenever a request is tested."""


class _MpiTransfer:
    __slots__ = ("_outlives_others", "_request")

    def __init__(self, outlives_others: bool) -> None:
        self._outlives_others = outlives_others
        self._request: MPI.Request | None = None  # keeps the buffer alive; None: its rank is lost

    def attempt(self, start: Callable[[], MPI.Request]) -> None:
        try:
            self._request = start()
        except MPI.Exception as error:
            self._raise_unless_lost(error)

    def done(self) -> bool:
        if self._request is None:
            return False
        try:
            return self._request.Test()
        except MPI.Exception as error:
            self._raise_unless_lost(error)
            self._request = None
            return False

    def _raise_unless_lost(self, error: MPI.Exception) -> None:
        if not (self._outlives_others and is_loss(error)):
            raise error
