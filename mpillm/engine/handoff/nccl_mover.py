"""Move KV caches from GPU to GPU over NCCL, without a copy on a host.

NCCL matches messages by order, and a sending kernel keeps a part of its GPU busy until the receiver's kernel
runs. So a sender launches a kernel only after its buffers are filled, and sends a notice to the receiver's
host over MPI. The receiver launches its receives in the order of the notices.

Contexts may finish in another order than they start. So a receive waits for the notice with its tag. A notice
waits until its receives are posted, and later notices of the same rank wait behind it. The receiver's next
steps post the receives independently of the sender. Small buffers that are ready together share a kernel,
because a launch takes longer than the transfer of a small buffer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from mpi4py import MPI
from torch import Tensor

from mpillm.engine.handoff.notes import Notes, take_first
from mpillm.engine.parallel.nccl import NcclComm
from mpillm.engine.schedule.engine_messages import NCCL_ID, NOTICE, Notice
from mpillm.engine.tensors.staging import StreamEvent

_MAX_LAUNCH_BYTES = 64 << 20  # the buffer that reaches this sum is the last of its launch


class SendReceiveLink(Protocol):
    """One direction of transfers between this rank's GPU and another GPU. No method waits."""

    def mark(self) -> StreamEvent:
        """Return an event at the end of the GPU's work so far, except for the links' own streams."""
        ...

    def notify(self, together: list[Notice]) -> None: ...

    def notices(self) -> list[list[Notice]]:
        """Return the notices since the last call, in order."""
        ...

    def send(self, buffers: list[Tensor]) -> StreamEvent:
        """Launch the sends together; sends and receives match by order."""
        ...

    def receive(self, buffers: list[Tensor], ready: list[StreamEvent]) -> StreamEvent:
        """Launch the receives together, to begin after all events in `ready`."""
        ...


class NcclLink:
    """A link between two ranks of the handoff communicator, on its own stream."""

    def __init__(self, comm: MPI.Intracomm, peer: int, *, sends: bool) -> None:
        """Collective over both ranks."""
        self._notes = Notes(comm, peer, NOTICE)

        def exchange_id(unique: bytes) -> bytes:
            buffer = NCCL_ID.write(unique).copy()
            if sends:
                comm.Send((buffer, MPI.BYTE), peer, NCCL_ID.tag)
            else:
                comm.Recv((buffer, MPI.BYTE), peer, NCCL_ID.tag)
            return NCCL_ID.read(buffer)

        self._nccl = NcclComm(0 if sends else 1, 2, exchange_id)
        # High priority: a transfer's few thread blocks run between those of a step's kernels.
        self._stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        # The first message makes both hosts wait for each other, so exchange it before they have other work.
        first = torch.zeros(1, dtype=torch.uint8, device="cuda")
        torch.cuda.current_stream().synchronize()
        with torch.cuda.stream(self._stream):
            (self._nccl.send if sends else self._nccl.receive)(first, 1 if sends else 0)
        self._stream.synchronize()

    def mark(self) -> StreamEvent:
        return event(torch.cuda.current_stream())

    def notify(self, together: list[Notice]) -> None:
        self._notes.send(together)

    def notices(self) -> list[list[Notice]]:
        return self._notes.take()

    def send(self, buffers: list[Tensor]) -> StreamEvent:
        with torch.cuda.stream(self._stream), self._nccl.group():
            for buffer in buffers:
                self._nccl.send(buffer, 1)
        return event(self._stream)

    def receive(self, buffers: list[Tensor], ready: list[StreamEvent]) -> StreamEvent:
        for one in ready:
            self._stream.wait_event(one)  # type: ignore[arg-type]
        with torch.cuda.stream(self._stream), self._nccl.group():
            for buffer in buffers:
                self._nccl.receive(buffer, 0)
        return event(self._stream)


def event(stream: torch.cuda.Stream) -> StreamEvent:
    """Return an event at the end of the stream's work so far."""
    recorded = torch.cuda.Event()  # type: ignore[no-untyped-call]
    recorded.record(stream)
    return recorded


class NcclMover:
    """A `Mover` of tensors on a GPU (uint8 [bytes])."""

    min_split_bytes = 256 << 20

    def __init__(self, links: dict[int, SendReceiveLink]) -> None:
        """`links`: by rank of the handoff communicator, each in one direction; `connected` creates them."""
        self._lanes = {rank: _Lane(link) for rank, link in links.items()}

    @classmethod
    def connected(cls, comm: MPI.Intracomm, ranks: Iterable[int], *, sends: bool) -> NcclMover:
        """Create the links to, or from, `ranks` of the handoff communicator. Collective over both ends.

        Every rank begins with the lowest rank, which prevents a deadlock.
        """
        return cls({rank: NcclLink(comm, rank, sends=sends) for rank in sorted(ranks)})

    def send(self, rank: int, tag: int, buffer: Any) -> _NcclTransfer:
        """`buffer` is filled by the current stream's work so far."""
        lane = self._lanes[rank]
        lane.go_on()
        transfer = _NcclTransfer(tag, buffer, lane.link.mark())
        lane.to_send.append(transfer)
        return transfer

    def receive(self, rank: int, tag: int, buffer: Any) -> _NcclTransfer:
        """`buffer` may be in use by the current stream's work so far."""
        lane = self._lanes[rank]
        transfer = _NcclTransfer(tag, buffer, lane.link.mark())
        lane.expected.setdefault(tag, deque()).append(transfer)
        return transfer

    def poll(self) -> None:
        for lane in self._lanes.values():
            lane.go_on()


class _NcclTransfer:
    def __init__(self, tag: int, buffer: Tensor, ready: StreamEvent) -> None:
        self.tag = tag
        self.buffer = buffer
        self.ready = ready
        self.launched: StreamEvent | None = None

    def done(self) -> bool:
        return self.launched is not None and self.launched.query()


class _Lane:
    """Transfers over one link."""

    def __init__(self, link: SendReceiveLink) -> None:
        self.link = link
        self.to_send: deque[_NcclTransfer] = deque()  # sends not launched
        self.expected: dict[int, deque[_NcclTransfer]] = {}  # tag -> receives not launched
        self._noticed: deque[list[Notice]] = deque()  # notices whose receives are not launched
        self._matched: list[_NcclTransfer] = []  # receives for the first list of notices

    def go_on(self) -> None:
        """Launch all ready transfers."""
        while self.to_send and self.to_send[0].ready.query():
            together, n_bytes = [self.to_send.popleft()], 0
            while (
                (n_bytes := n_bytes + together[-1].buffer.nbytes) < _MAX_LAUNCH_BYTES
                and self.to_send
                and self.to_send[0].ready.query()
            ):
                together.append(self.to_send.popleft())
            self.link.notify([Notice(transfer.tag, transfer.buffer.nbytes) for transfer in together])
            _launched(together, self.link.send([transfer.buffer for transfer in together]))
        if self.expected:
            self._noticed += self.link.notices()
        while self._noticed and self._match(self._noticed[0]):
            self._noticed.popleft()
            together, self._matched = self._matched, []
            ready = [transfer.ready for transfer in together]
            _launched(together, self.link.receive([transfer.buffer for transfer in together], ready))

    def _match(self, notices: list[Notice]) -> bool:
        """Return whether receives for all `notices` are posted."""
        for tag, n_bytes in notices[len(self._matched) :]:
            if tag not in self.expected:
                return False
            transfer = take_first(self.expected, tag)
            if n_bytes != transfer.buffer.nbytes:
                raise RuntimeError(
                    f"handoff, tag {tag}: {transfer.buffer.nbytes} bytes expected, {n_bytes} sent"
                )
            self._matched.append(transfer)
        return True


def _launched(together: list[_NcclTransfer], event: StreamEvent) -> None:
    for transfer in together:
        transfer.launched = event
