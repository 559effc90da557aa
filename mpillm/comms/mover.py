"""What moves KV caches from rank to rank. Nothing here waits.

On GPUs `engine.nccl_mover` takes the place of `MpiMover`; who sends what to whom, and when, does not change.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from mpi4py import MPI


class Peer(NamedTuple):
    """An instance at the other end of a handoff. Its ranks follow each other in the handoff communicator, `tp_rank` varying fastest."""

    rank: int  # of its leader in the handoff communicator
    tp_size: int
    pp_size: int


class Moving(Protocol):
    """A buffer under way."""

    def done(self) -> bool:
        """Whether it has left, or arrived."""
        ...


class Mover(Protocol):
    """Buffers between two ranks with the same tag arrive in the order in which they were sent."""

    whole_below: int  # bytes: with less, to move it in several pieces costs more than it gains

    def send(self, rank: int, tag: int, buffer: Any) -> Moving:
        """Send `buffer`, which must not change until that is done, to `rank` of the handoff communicator."""
        ...

    def receive(self, rank: int, tag: int, buffer: Any) -> Moving:
        """Fill `buffer`, which has the size of what `rank` sends."""
        ...

    def poll(self) -> None:
        """Let things go on; called before buffers are asked whether they are done."""
        ...


class MpiMover:
    """Memory that NumPy can see, over MPI."""

    whole_below = 0

    def __init__(self, comm: MPI.Intracomm) -> None:
        """`comm`: the handoff communicator; nothing else may receive from any rank or with any tag there."""
        self.comm = comm

    def send(self, rank: int, tag: int, buffer: Any) -> Moving:
        return _Moving(self.comm.Isend((np.asarray(buffer), MPI.BYTE), rank, tag))

    def receive(self, rank: int, tag: int, buffer: Any) -> Moving:
        return _Moving(self.comm.Irecv((np.asarray(buffer), MPI.BYTE), rank, tag))

    def poll(self) -> None:
        """MPI goes on whenever a request is tested."""


class _Moving(NamedTuple):
    request: MPI.Request  # keeps the buffer

    def done(self) -> bool:
        return self.request.Test()
