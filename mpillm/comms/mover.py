"""Movers: they move KV caches from rank to rank. Nothing here waits.

On GPUs movers of `engine.handoff` replace `MpiMover`; who sends what to whom, and when, stays the same.
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

    rank: int  # its leader's, in the handoff communicator
    tp_size: int
    pp_size: int


class TransferHandle(Protocol):
    """A transfer in progress."""

    def done(self) -> bool:
        """Return whether the buffer has left, or arrived."""
        ...


class Mover(Protocol):
    """Sends and receives buffers. Those between two ranks with the same tag arrive in the order sent."""

    whole_below: int  # bytes: moving less than this in several pieces costs more than it gains

    def send(self, rank: int, tag: int, buffer: Any) -> TransferHandle:
        """Send `buffer` to `rank` of the handoff communicator; it must not change until that is done."""
        ...

    def receive(self, rank: int, tag: int, buffer: Any) -> TransferHandle:
        """Fill `buffer`, of the size that `rank` sends."""
        ...

    def poll(self) -> None:
        """Make progress; call this before asking transfers whether they are done."""
        ...


class BlockMover(Protocol):
    """Moves parts of KV caches from blocks to blocks, without buffers."""

    ranks: frozenset[int]  # of the handoff communicator: those that it reaches

    def move(self, rank: int, tag: int, cached: Any, layers: slice, heads: slice) -> TransferHandle:
        """Send or receive some layers and heads of what is held in some blocks.

        The next `poll` begins it, after the work that this rank has launched so far.
        """
        ...

    def poll(self) -> None:
        """Make progress; call this also after `move`."""
        ...


class MpiMover:
    """Moves memory that NumPy can address, over MPI."""

    whole_below = 0

    def __init__(self, comm: MPI.Intracomm, *, outlives_others: bool = False) -> None:
        """`comm`: the handoff communicator; nothing else may receive in it from any source or any tag.

        `outlives_others`: what moves from or to a rank that is lost is never done, and no error.
        """
        self.comm = comm
        self._outlives_others = outlives_others

    def send(self, rank: int, tag: int, buffer: Any) -> TransferHandle:
        return self._moving(lambda: self.comm.Isend((np.asarray(buffer), MPI.BYTE), rank, tag))

    def receive(self, rank: int, tag: int, buffer: Any) -> TransferHandle:
        return self._moving(lambda: self.comm.Irecv((np.asarray(buffer), MPI.BYTE), rank, tag))

    def _moving(self, start: Callable[[], MPI.Request]) -> TransferHandle:
        moving = _MpiTransfer(self._outlives_others)
        moving.attempt(start)
        return moving

    def poll(self) -> None:
        """Nothing to do: MPI makes progress whenever a request is tested."""


class _MpiTransfer:
    __slots__ = ("_outlives_others", "_request")

    def __init__(self, outlives_others: bool) -> None:
        self._outlives_others = outlives_others
        self._request: MPI.Request | None = None  # keeps the buffer alive; None: its rank is lost

    def attempt(self, start: Callable[[], MPI.Request]) -> None:
        try:
            self._request = start()
        except MPI.Exception as error:
            self._pass_over(error)

    def done(self) -> bool:
        if self._request is None:
            return False
        try:
            return self._request.Test()
        except MPI.Exception as error:
            self._pass_over(error)
            self._request = None
            return False

    def _pass_over(self, error: MPI.Exception) -> None:
        if not (self._outlives_others and is_loss(error)):
            raise error
