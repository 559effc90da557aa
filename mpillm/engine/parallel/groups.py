"""What the ranks of an instance send each other: tensors, step plans and sampled tokens.

`Groups` is an instance of one rank, which sends nothing. `MpiGroups` sends tensors in host memory over MPI. A
transport for tensors on devices replaces the methods under "tensors" and keeps the rest: plans and tokens are
host data anyway.

Sends never wait, and receives are polled; only collectives wait, in a step that every member of the TP group
is about to run, in the same order.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpillm.comms.tags import Tag
from mpillm.engine.parallel.layout import Layout

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpillm.comms.communicators import InstanceComms

Plan = NDArray[np.int32]


class Groups:
    """An instance of one rank; the interface that the model needs from its TP group."""

    def __init__(self, layout: Layout = Layout()) -> None:  # noqa: B008 - it is frozen
        self.layout = layout

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over the TP group, the same on each rank; x may be changed."""
        return x

    def gather(self, x: Tensor, widths: list[int]) -> Tensor | None:
        """Return x [n, widths[tp_rank]] of all ranks side by side, at least on TP rank 0; else None."""
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Return TP rank 0's x on all ranks of the TP group."""
        return x


class MpiGroups(Groups):
    """One of several ranks, over the communicators of their instance."""

    def __init__(self, layout: Layout, comms: InstanceComms) -> None:
        super().__init__(layout)
        from mpi4py import MPI

        self._mpi = MPI
        self._instance, self._tp, self._pp = comms.instance, comms.tp, comms.pp
        self._sampler = self._instance.size - layout.tp_size  # the first rank of the last stage
        self._sending: deque[tuple[MPI.Request, Any]] = deque()
        self._hidden: tuple[MPI.Request, NDArray[np.uint8]] | None = None
        self._status = MPI.Status()

    # --- tensors ---

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._tp.size == 1 or not x.numel():
            return x
        total = x.float().contiguous()  # float32: MPI has no bfloat16, and sums lose less
        self._tp.Allreduce(self._mpi.IN_PLACE, (total.numpy(), self._mpi.FLOAT))
        return total.to(x.dtype)

    def gather(self, x: Tensor, widths: list[int]) -> Tensor | None:
        if self._tp.size == 1:
            return x
        sizes = [len(x) * width * x.element_size() for width in widths]
        gathered = np.empty(sum(sizes), np.uint8) if self._tp.rank == 0 else None
        self._tp.Gatherv((_bytes(x), self._mpi.BYTE), (gathered, sizes, None, self._mpi.BYTE), 0)
        if gathered is None:
            return None
        parts = torch.split(torch.from_numpy(gathered), sizes)
        return torch.cat(
            [part.view(x.dtype).view(len(x), width) for part, width in zip(parts, widths, strict=True)],
            dim=-1,
        )

    def send_hidden(self, x: Tensor) -> None:
        """Send x to the next stage; x must not change afterwards."""
        self._send(self._pp, self._pp.rank + 1, Tag.HIDDEN, _bytes(x))

    def has_hidden(self) -> bool:
        """Return whether something from the previous stage has arrived."""
        if (
            self._hidden is None
            and (message := self._pp.Improbe(self._pp.rank - 1, Tag.HIDDEN, self._status)) is not None
        ):
            buffer = np.empty(self._status.Get_count(self._mpi.BYTE), np.uint8)
            # Not Mrecv: a large message needs its sender's help, and the sender may be in its next step.
            self._hidden = message.Irecv((buffer, self._mpi.BYTE)), buffer
        return self._hidden is not None and self._hidden[0].Test()

    def receive_hidden(self, n_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return what `has_hidden` has found: [n_rows, width]."""
        assert self._hidden is not None
        buffer, self._hidden = self._hidden[1], None
        return torch.from_numpy(buffer).view(dtype).view(n_rows, width)

    # --- plans and tokens ---

    def send_plan(self, plan: Plan) -> None:
        """Send the leader's plan to all others."""
        for rank in range(1, self._instance.size):
            self._send(self._instance, rank, Tag.PLAN, plan)

    def take_plan(self) -> Plan | None:
        """Return the leader's next plan, if it has arrived."""
        return self._take(0, Tag.PLAN)

    def send_tokens(self, tokens: list[int]) -> None:
        """Send tokens from the first rank of the last stage to the leader."""
        self._send(self._instance, 0, Tag.TOKENS, np.array(tokens, np.int32))

    def take_tokens(self) -> list[int] | None:
        """Return the tokens of the oldest step not taken yet, if they have arrived."""
        tokens = self._take(self._sampler, Tag.TOKENS)
        return None if tokens is None else tokens.tolist()

    def send_moved(self, tickets: list[int]) -> None:
        """Tell the leader that these transfers are done on this rank."""
        self._send(self._instance, 0, Tag.MOVED, np.array(tickets, np.int32))

    def take_moved(self) -> list[int] | None:
        """Return what one of the other ranks has sent, if anything has arrived."""
        tickets = self._take(self._mpi.ANY_SOURCE, Tag.MOVED)
        return None if tickets is None else tickets.tolist()

    def _send(self, comm: MPI.Intracomm, rank: int, tag: Tag, buffer: NDArray[Any]) -> None:
        while self._sending and self._sending[0][0].Test():
            self._sending.popleft()
        self._sending.append((comm.Isend((buffer, self._mpi.BYTE), rank, tag), buffer))

    def _take(self, rank: int, tag: Tag) -> Plan | None:
        message = self._instance.Improbe(rank, tag, self._status)
        if message is None:
            return None
        buffer = np.empty(self._status.Get_count(self._mpi.BYTE) // 4, np.int32)
        message.Recv((buffer, self._mpi.BYTE))
        return buffer


def _bytes(x: Tensor) -> NDArray[np.uint8]:
    """Return the memory of x, or of a contiguous copy."""
    raw: NDArray[np.uint8] = x.contiguous().view(torch.uint8).numpy()
    return raw
