"""Move KV caches between a GPU and the host memory of a rank (`host_end`).

A separate stream copies between the GPU and pinned memory, parallel to the steps. The rank with the memory
copies its own pieces directly. Pieces of other ranks move over MPI.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpillm.comms.mover import Mover, TransferHandle
from mpillm.engine.handoff.nccl_mover import event
from mpillm.engine.handoff.notes import take_first
from mpillm.engine.handoff.pinned import PinnedMemory
from mpillm.engine.tensors.staging import StreamEvent


class CopyStream:
    """The CUDA stream of the copies. No method waits."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]

    def mark(self) -> StreamEvent:
        """Return an event at the end of the GPU's work so far, copies excluded."""
        return event(torch.cuda.current_stream())

    @torch.inference_mode()
    def copy(self, into: Tensor, source: Tensor, ready: StreamEvent) -> StreamEvent:
        """Launch a copy, to begin after `ready`."""
        self._stream.wait_event(ready)  # type: ignore[arg-type]
        with torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)
        return event(self._stream)


class HostMover:
    """A `Mover` of tensors on a GPU (uint8 [bytes]); `host_end`: the other end, in this rank's memory."""

    def __init__(self, mover: Mover, rank: int, pinned: PinnedMemory, stream: CopyStream) -> None:
        """
        Args:
            mover: Moves pieces between ranks.
            rank: This rank in the mover's communicator.
            pinned: Memory for pieces that move over MPI.
        """
        self._pinned = pinned
        self.min_split_bytes = mover.min_split_bytes
        self.host_end = _HostEnd(self, mover, rank)
        self._mover = mover
        self._rank = rank
        self._stream = stream
        self._met: dict[int, deque[_Copy]] = {}  # by tag: copies with one registered end
        self._to_send: deque[_Copy] = deque()  # not in host memory yet, in order
        self._to_receive: list[_Copy] = []  # not in host memory yet

    def send(self, rank: int, tag: int, buffer: Any) -> TransferHandle:
        """`buffer` is filled by the current stream's work so far."""
        if rank == self._rank:
            return self.meet(tag, gpu=buffer, to_host=True)
        copy = _Copy(buffer, self._like(buffer), self._stream.mark(), to_host=True, rank=rank, tag=tag)
        self._launch(copy)
        self._to_send.append(copy)
        return copy

    def receive(self, rank: int, tag: int, buffer: Any) -> TransferHandle:
        """`buffer` may be in use by the current stream's work so far."""
        if rank == self._rank:
            return self.meet(tag, gpu=buffer, to_host=False)
        copy = _Copy(buffer, self._like(buffer), self._stream.mark(), to_host=False)
        copy.over_mpi = self._mover.receive(rank, tag, copy.host)
        self._to_receive.append(copy)
        return copy

    def meet(
        self, tag: int, *, gpu: Tensor | None = None, host: Tensor | None = None, to_host: bool
    ) -> _Copy:
        """Register one end of a copy inside this rank. The copy begins when both ends are registered."""
        waiting = self._met.setdefault(tag, deque())
        free = None if gpu is None else self._stream.mark()
        if not waiting or (waiting[0].gpu is None) == (gpu is None):
            waiting.append(_Copy(gpu, host, free, to_host=to_host))
            return waiting[-1]
        copy = take_first(self._met, tag)
        if gpu is None:
            copy.host = host
        else:
            copy.gpu, copy.free = gpu, free
        self._launch(copy)
        return copy

    def poll(self) -> None:
        self._mover.poll()
        while self._to_send and self._to_send[0].is_copied():
            copy = self._to_send.popleft()
            copy.over_mpi = self._mover.send(copy.rank, copy.tag, copy.host)
        waiting = []
        for copy in self._to_receive:
            if copy.over_mpi is not None and copy.over_mpi.done():
                copy.over_mpi = None
                self._launch(copy)
            else:
                waiting.append(copy)
        self._to_receive = waiting

    def _like(self, buffer: Tensor) -> Tensor:
        return torch.from_numpy(self._pinned.new(buffer.nbytes))

    def _launch(self, copy: _Copy) -> None:
        assert copy.gpu is not None and copy.host is not None and copy.free is not None
        into, source = (copy.host, copy.gpu) if copy.to_host else (copy.gpu, copy.host)
        copy.copied = self._stream.copy(into, source, copy.free)


class _HostEnd:
    """The `Mover` of NumPy arrays at the host's end."""

    def __init__(self, gpus: HostMover, mover: Mover, rank: int) -> None:
        self.min_split_bytes = mover.min_split_bytes
        self._gpus = gpus
        self._mover = mover
        self._rank = rank

    def send(self, rank: int, tag: int, buffer: Any) -> TransferHandle:
        if rank == self._rank:
            return self._gpus.meet(tag, host=torch.from_numpy(buffer), to_host=False)
        return self._mover.send(rank, tag, buffer)

    def receive(self, rank: int, tag: int, buffer: Any) -> TransferHandle:
        if rank == self._rank:
            return self._gpus.meet(tag, host=torch.from_numpy(buffer), to_host=True)
        return self._mover.receive(rank, tag, buffer)

    def poll(self) -> None:
        self._mover.poll()


@dataclass(eq=False)
class _Copy:
    """A copy between a GPU and host memory, with the MPI transfer before or after it."""

    gpu: Tensor | None
    host: Tensor | None
    free: StreamEvent | None  # end of the current stream's work when `gpu` was registered
    to_host: bool
    rank: int = -1
    tag: int = -1
    copied: StreamEvent | None = None
    over_mpi: TransferHandle | None = None

    def is_copied(self) -> bool:
        return self.copied is not None and self.copied.query()

    def done(self) -> bool:
        if self.rank >= 0:
            return self.over_mpi is not None and self.over_mpi.done()
        return self.is_copied()
