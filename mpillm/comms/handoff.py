"""The handoff: a request and its KV cache move from a context to a generation instance.

The context instance offers a finished context (OFFER: the request and its first token). The generation instance takes offers in the
order in which they came; once it has room for the first, it posts the receive and accepts (ACCEPT). Then the KV cache moves (KV), and
the context instance frees its blocks when the send is complete. Nobody waits: a receiver without room leaves the KV cache where it is.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpillm.comms.tags import Tag
from mpillm.comms.transport import Received, Transport
from mpillm.cores.base import LLMCore
from mpillm.messages import Batch

_Send = tuple[MPI.Request, int, NDArray[np.uint8]]  # request id, KV cache
_Receive = tuple[MPI.Request, int, Batch, int, NDArray[np.uint8]]  # slot, request, first token, KV cache
_SLOTS = 256  # KV caches under way to one receiver


class HandoffSender:
    """The context instance's side."""

    def __init__(self, transport: Transport, core: LLMCore) -> None:
        self._transport = transport
        self._core = core
        self._sending: list[_Send] = []
        self.kv_bytes = 0
        transport.handlers[Tag.ACCEPT] = self._on_accept

    def offer(self, receiver: int, request: Batch, first_token: int) -> None:
        """Offer the KV cache of `request` (one row and its prompt) to rank `receiver` of the handoff communicator."""
        self._transport.send(receiver, Tag.OFFER, np.concatenate([request.pack(), np.array([first_token], np.int32).view(np.uint8)]))

    def announce(self, receiver: int, n_requests: int) -> None:
        """Tell a generation instance how many requests of the warm-up it will be offered."""
        self._transport.send(receiver, Tag.WARM_UP, np.array([n_requests], np.int64).view(np.uint8))

    def poll(self) -> list[int]:
        """Ids of requests whose KV cache has left; their blocks are free again."""
        self._transport.dispatch()
        if not self._sending:
            return []
        done: list[_Send] = []
        sending: list[_Send] = []
        for entry in self._sending:
            (done if entry[0].Test() else sending).append(entry)
        self._sending = sending
        for _, id_, _ in done:
            self._core.release_kv(id_)
        return [id_ for _, id_, _ in done]

    def _on_accept(self, received: Received) -> None:
        id_, slot = (int(x) for x in received.buffer.view(np.int64))
        buffer = self._core.export_kv(id_)
        self.kv_bytes += buffer.nbytes
        self._sending.append((self._transport.comm.Isend((buffer, MPI.BYTE), received.source, Tag.KV + slot), id_, buffer))


class HandoffReceiver:
    """The generation instance's side."""

    def __init__(self, transport: Transport, core: LLMCore) -> None:
        self._transport = transport
        self._core = core
        self._offers: deque[tuple[int, Batch, int]] = deque()
        self._receiving: list[_Receive] = []
        self._slots = list(range(_SLOTS))
        self.offered = 0  # since the start
        self.announced: dict[int, int] = {}  # requests of the warm-up by sender
        transport.handlers[Tag.OFFER] = self._on_offer
        transport.handlers[Tag.WARM_UP] = self._on_warm_up

    def poll(self) -> bool:
        """Accept what there is room for, and admit what has arrived; whether anything moved."""
        worked = self._transport.dispatch()
        while self._offers and self._slots:
            source, request, first_token = self._offers[0]
            buffer = self._core.reserve_kv(request.rows[0])
            if buffer is None:
                break
            self._offers.popleft()
            slot = self._slots.pop()
            receive = self._transport.comm.Irecv((buffer, MPI.BYTE), source, Tag.KV + slot)
            self._receiving.append((receive, slot, request, first_token, buffer))
            self._transport.send(source, Tag.ACCEPT, np.array([request.rows["id"][0], slot], np.int64).view(np.uint8))
            worked = True
        arrived: list[_Receive] = []
        receiving: list[_Receive] = []
        for entry in self._receiving:
            (arrived if entry[0].Test() else receiving).append(entry)
        self._receiving = receiving
        for _, slot, request, first_token, _ in arrived:
            self._slots.append(slot)
            self._core.admit(request, first_token)
        return worked or bool(arrived)

    def _on_warm_up(self, received: Received) -> None:
        self.announced[received.source] = int(received.buffer.view(np.int64)[0])

    def _on_offer(self, received: Received) -> None:
        self.offered += 1
        request, _ = Batch.unpack(received.buffer[:-4])
        self._offers.append((received.source, request, int(received.buffer[-4:].view(np.int32)[0])))
