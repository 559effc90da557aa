"""KV caches from GPU to GPU over NCCL, without a copy on a host.

NCCL matches messages by order, and a kernel that sends keeps a part of its GPU busy until the receiver's has come. So a sender launches one
when its buffers are filled, and no sooner; a notice over MPI tells the receiver's host, which has them received in the notices' order.
Contexts may be computed in another order than that in which they were accepted: receives wait by their tag for their notice, and a notice
waits (with those behind it, from the same rank) for its receives, which are posted by the receiver's next steps, whatever the sender does.
Small buffers that are ready together go together, in one kernel: their launches would take longer than their bytes.
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
    """Of a buffer that a sender has launched."""

    tag: int
    n_bytes: int


_TOGETHER = 64 << 20  # bytes: what buffers that go together fill, or overfill with the last of them


class Link(Protocol):
    """From this rank's GPU to another one, or from there to here. Nothing waits."""

    def mark(self) -> Event:
        """The end of what the GPU has been given so far, outside of links."""
        ...

    def notify(self, together: list[Notice]) -> None: ...

    def notices(self) -> list[list[Notice]]:
        """What was notified of since this was last asked, in that order."""
        ...

    def send(self, buffers: list[Tensor]) -> Event:
        """Launch them together; sends and receives are matched by order."""
        ...

    def receive(self, buffers: list[Tensor], ready: list[Event]) -> Event:
        """Launch them together, to begin after all of `ready`."""
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

    def notify(self, together: list[Notice]) -> None:
        while self._notifying and self._notifying[0].Test():
            self._notifying.popleft()
        self._notifying.append(self._comm.Isend(np.array(together, np.int64), self._peer, Tag.NOTICE))

    def notices(self) -> list[list[Notice]]:
        came, status = [], MPI.Status()
        while self._comm.Iprobe(self._peer, Tag.NOTICE, status):
            numbers = np.empty((status.Get_count(MPI.INT64_T) // 2, 2), np.int64)
            self._comm.Recv(numbers, self._peer, Tag.NOTICE)
            came.append([Notice(*row) for row in numbers.tolist()])
        return came

    def send(self, buffers: list[Tensor]) -> Event:
        with torch.cuda.stream(self._stream), self._nccl.group():
            for buffer in buffers:
                self._nccl.send(buffer, 1)
        return _event(self._stream)

    def receive(self, buffers: list[Tensor], ready: list[Event]) -> Event:
        for event in ready:
            self._stream.wait_event(event)  # type: ignore[arg-type]
        with torch.cuda.stream(self._stream), self._nccl.group():
            for buffer in buffers:
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
        lane.go_on()
        moving = _Moving(tag, buffer, lane.link.mark())
        lane.leaving.append(moving)
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
        self._noticed: deque[list[Notice]] = deque()  # and not received
        self._matched: list[_Moving] = []  # with the first of them

    def go_on(self) -> None:
        """Launch what can be."""
        while self.leaving and self.leaving[0].ready.query():
            together, n_bytes = [self.leaving.popleft()], 0
            while (n_bytes := n_bytes + together[-1].buffer.nbytes) < _TOGETHER and self.leaving and self.leaving[0].ready.query():
                together.append(self.leaving.popleft())
            self.link.notify([Notice(moving.tag, moving.buffer.nbytes) for moving in together])
            _launched(together, self.link.send([moving.buffer for moving in together]))
        if self.expected:
            self._noticed += self.link.notices()
        while self._noticed and self._match(self._noticed[0]):
            self._noticed.popleft()
            together, self._matched = self._matched, []
            _launched(together, self.link.receive([moving.buffer for moving in together], [moving.ready for moving in together]))

    def _match(self, notices: list[Notice]) -> bool:
        """Whether all that was sent together is expected by now."""
        for tag, n_bytes in notices[len(self._matched) :]:
            waiting = self.expected.get(tag)
            if not waiting:
                return False
            moving = waiting.popleft()
            if not waiting:
                del self.expected[tag]
            if n_bytes != moving.buffer.nbytes:
                raise RuntimeError(f"handoff: {moving.buffer.nbytes} bytes are expected with tag {tag}, {n_bytes} come")
            self._matched.append(moving)
        return True


def _launched(together: list[_Moving], event: Event) -> None:
    for moving in together:
        moving.launched = event
