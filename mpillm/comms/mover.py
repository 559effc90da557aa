"""Movers: they move KV caches from rank to rank. Nothing here waits.

On GPUs `engine.handoff.nccl_mover` replaces `MpiMover`; who sends what to whom, and when, stays the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from mpi4py import MPI


class Peer(NamedTuple):
    """The instance at the other end of a handoff.

    Its ranks are consecutive in the handoff communicator, `tp_rank` varying fastest.
    """

    rank: int  # its leader's, in the handoff communicator
    tp_size: int
    pp_size: int


class Moving(Protocol):
    """A transfer in progress."""

    def done(self) -> bool:
        """Return whether the buffer has left, or arrived."""
        ...


class Mover(Protocol):
    """Sends and receives buffers. Those between two ranks with the same tag arrive in the order sent."""

    whole_below: int  # bytes: moving less than this in several pieces costs more than it gains

    def send(self, rank: int, tag: int, buffer: Any) -> Moving:
        """Send `buffer` to `rank` of the handoff communicator; it must not change until that is done."""
        ...

    def receive(self, rank: int, tag: int, buffer: Any) -> Moving:
        """Fill `buffer`, of the size that `rank` sends."""
        ...

    def poll(self) -> None:
        """Make progress; call this before asking transfers whether they are done."""
        ...


class MpiMover:
    """Moves memory that NumPy can address, over MPI."""

    whole_below = 0

    def __init__(self, comm: MPI.Intracomm) -> None:
        """`comm`: the handoff communicator; nothing else may receive in it from any source or any tag."""
        self.comm = comm

    def send(self, rank: int, tag: int, buffer: Any) -> Moving:
        return _Moving(self.comm.Isend((np.asarray(buffer), MPI.BYTE), rank, tag))

    def receive(self, rank: int, tag: int, buffer: Any) -> Moving:
        return _Moving(self.comm.Irecv((np.asarray(buffer), MPI.BYTE), rank, tag))

    def poll(self) -> None:
        """Nothing to do: MPI makes progress whenever a request is tested."""


class _Moving(NamedTuple):
    request: MPI.Request  # keeps the buffer alive

    def done(self) -> bool:
        return self.request.Test()
