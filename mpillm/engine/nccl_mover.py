"""KV caches from GPU to GPU over NCCL, without a copy on a host.

NCCL matches messages by order, and a kernel that sends keeps a part of its GPU busy until the receiver's has come. So a sender launches one
when its buffer is filled, and no sooner; a notice over MPI tells the receiver's host, which has it received in the order of the notices.
Contexts may be computed in another order than that in which they were accepted: receives wait by their tag for their notice, and a notice
waits (with those behind it, from the same rank) for its receive, which is posted by the receiver's next steps, whatever the sender does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from mpillm.comms.tags import Tag
from mpillm.engine.nccl import NcclComm


class Event(Protocol):
    """A place in a stream."""

    def query(self) -> bool:
        """Whether all that comes before it is done."""
        ...


class Notice(NamedTuple):
    """What a sender has launched."""

    tag: int
    n_bytes: int


class Link(Protocol):
    """From this rank's GPU to another one, or from there to here. Nothing waits."""

    def mark(self) -> Event:
        """The end of what the GPU has been given so far, outside of links."""
        ...

    def notify(self, notice: Notice) -> None: ...

    def notices(self) -> list[Notice]:
        """Those that have come since this was last asked, in the order in which they were sent."""
        ...

    def send(self, buffer: Tensor) -> Event:
        """Launch it; sends and receives are matched by order."""
        ...

    def receive(self, buffer: Tensor, ready: Event) -> Event:
        """Launch it, to begin after `ready`."""
        ...


class NcclLink:
    """Between two ranks of the handoff communicator, on a stream of its own."""

    def __init__(self, comm: MPI.Intracomm, peer: int, *, sends: bool) -> None:
        """To be made by both at once."""
        self._comm = comm
        self._peer = peer
        self._notifying: deque[MPI.Request] = deque()

        def tell(unique: bytes) -> bytes:
            if not sends:
                return bytes(comm.recv(source=peer, tag=Tag.NCCL_ID))
            comm.send(unique, peer, Tag.NCCL_ID)
            return unique

        self._nccl = NcclComm(0 if sends else 1, 2, tell)
        # Of high priority: a transfer's few blocks of threads go between those of a step's kernels.
        self._stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        # The first message makes both hosts wait for each other: here nobody has anything else to do.
        first = torch.zeros(1, dtype=torch.uint8, device="cuda")
        torch.cuda.current_stream().synchronize()
        with torch.cuda.stream(self._stream):
            (self._nccl.send if sends else self._nccl.receive)(first, 1 if sends else 0)
        self._stream.synchronize()

    def mark(self) -> Event:
        return _event(torch.cuda.current_stream())

    def notify(self, notice: Notice) -> None:
        while self._notifying and self._notifying[0].Test():
            self._notifying.popleft()
        self._notifying.append(self._comm.Isend(np.array(notice, np.int64), self._peer, Tag.NOTICE))

    def notices(self) -> list[Notice]:
        came = []
        while self._comm.Iprobe(self._peer, Tag.NOTICE):
            numbers = np.empty(2, np.int64)
            self._comm.Recv(numbers, self._peer, Tag.NOTICE)
            came.append(Notice(*numbers.tolist()))
        return came

    def send(self, buffer: Tensor) -> Event:
        with torch.cuda.stream(self._stream):
            self._nccl.send(buffer, 1)
        return _event(self._stream)

    def receive(self, buffer: Tensor, ready: Event) -> Event:
        self._stream.wait_event(ready)  # type: ignore[arg-type]
        with torch.cuda.stream(self._stream):
            self._nccl.receive(buffer, 0)
        return _event(self._stream)


def _event(stream: torch.cuda.Stream) -> Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


class NcclMover:
    """A `Mover` of tensors on a GPU (uint8 [bytes])."""

    whole_below = 256 << 20

    def __init__(self, links: dict[int, Link]) -> None:
        """By rank of the handoff communicator, each in one direction; `connected` makes them."""
        self._lanes = {rank: _Lane(link) for rank, link in links.items()}

    @classmethod
    def connected(cls, comm: MPI.Intracomm, ranks: Iterable[int], *, sends: bool) -> NcclMover:
        """To `ranks` of the handoff communicator, or from them. They make theirs meanwhile, and this waits for them.

        Everyone meets their lowest rank first, so that links come about in one order for all, and nobody waits in a circle.
        """
        return cls({rank: NcclLink(comm, rank, sends=sends) for rank in sorted(ranks)})

    def send(self, rank: int, tag: int, buffer: Any) -> _Moving:
        """`buffer` is being filled by what the current stream has been given so far."""
        lane = self._lanes[rank]
        moving = _Moving(tag, buffer, lane.link.mark())
        lane.leaving.append(moving)
        lane.go_on()
        return moving

    def receive(self, rank: int, tag: int, buffer: Any) -> _Moving:
        """`buffer` may be in use by what the current stream has been given so far."""
        lane = self._lanes[rank]
        moving = _Moving(tag, buffer, lane.link.mark())
        lane.expected.setdefault(tag, deque()).append(moving)
        return moving

    def poll(self) -> None:
        for lane in self._lanes.values():
            lane.go_on()


class _Moving:
    def __init__(self, tag: int, buffer: Tensor, ready: Event) -> None:
        self.tag = tag
        self.buffer = buffer
        self.ready = ready
        self.launched: Event | None = None

    def done(self) -> bool:
        return self.launched is not None and self.launched.query()


class _Lane:
    """What goes over a link."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.leaving: deque[_Moving] = deque()  # not launched
        self.expected: dict[int, deque[_Moving]] = {}  # not launched, by tag
        self._noticed: deque[Notice] = deque()  # and not received

    def go_on(self) -> None:
        """Launch what can be."""
        while self.leaving and self.leaving[0].ready.query():
            moving = self.leaving.popleft()
            self.link.notify(Notice(moving.tag, moving.buffer.nbytes))
            moving.launched = self.link.send(moving.buffer)
        if self.expected:
            self._noticed += self.link.notices()
        while self._noticed and (waiting := self.expected.get(self._noticed[0].tag)):
            notice, moving = self._noticed.popleft(), waiting.popleft()
            if not waiting:
                del self.expected[notice.tag]
            if notice.n_bytes != moving.buffer.nbytes:
                raise RuntimeError(f"handoff: {moving.buffer.nbytes} bytes are expected with tag {notice.tag}, {notice.n_bytes} come")
            moving.launched = self.link.receive(moving.buffer, moving.ready)
