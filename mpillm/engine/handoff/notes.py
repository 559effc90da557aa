"""MPI messages between two ranks whose KV caches do not move over MPI."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

import numpy as np
from mpi4py import MPI

from mpillm.comms.messages import Message

T = TypeVar("T")


def take_first(queues: dict[int, deque[T]], tag: int) -> T:
    """Remove and return the first entry of a tag. Tags without entries are not in `queues`."""
    queue = queues[tag]
    first = queue.popleft()
    if not queue:
        del queues[tag]
    return first


class Notes(Generic[T]):
    """Messages of one type from or to one rank of the handoff communicator. No method waits."""

    def __init__(self, comm: MPI.Intracomm, peer: int, message: Message[T]) -> None:
        self._comm, self._peer, self._message = comm, peer, message
        self._in_flight: deque[MPI.Request] = deque()

    def send(self, value: T) -> None:
        while self._in_flight and self._in_flight[0].Test():
            self._in_flight.popleft()
        buffer = self._message.write(value)
        self._in_flight.append(self._comm.Isend((buffer, MPI.BYTE), self._peer, self._message.tag))

    def take(self) -> list[T]:
        """Return the messages since the last call, in order."""
        received, status = [], MPI.Status()
        while self._comm.Iprobe(self._peer, self._message.tag, status):
            buffer = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            self._comm.Recv((buffer, MPI.BYTE), self._peer, self._message.tag)
            received.append(self._message.read(buffer))
        return received
