"""Messages between the ranks of an instance: tensors, step plans and sampled tokens.

`Groups` is an instance of one rank, which sends nothing. `MpiGroups` sends tensors in host memory over MPI. A
transport for tensors on devices replaces the methods under "tensors" only, since plans and tokens are host
data.

Sends never wait, and receives are polled. Only collectives wait: every member of the TP group runs the same
steps in the same order.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mpillm.comms.messages import Message
from mpillm.comms.tags import Tag
from mpillm.comms.yielding import yielding_while_waiting
from mpillm.engine.schedule.engine_messages import MOVED, PLAN, TOKENS
from mpillm.engine.schedule.step import Step
from mpillm.engine.shape.layout import RankLayout

if TYPE_CHECKING:
    from mpillm.comms.communicators import InstanceComms
    from mpillm.engine.parallel.shared_rows import SharedRows

# A step's rows in the weights' dtype, received as uint8 [bytes]: the step determines their shape.
HIDDEN: Message[Tensor] = Message(
    Tag.HIDDEN, lambda x: x.contiguous().view(torch.uint8).numpy().reshape(-1), torch.from_numpy
)


class Groups:
    """An instance of one rank; the interface that the model needs from its TP group."""

    def __init__(self, layout: RankLayout = RankLayout()) -> None:  # noqa: B008 - it is frozen
        self.layout = layout
        self.shared_rows: SharedRows | None = None  # on GPUs, for sums that the next operation computes

    def share_rows(self, width: int, dtype: torch.dtype) -> None:
        """Set `shared_rows` if the TP group's GPUs can access each other's memory. Collective."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over the TP group, the same on each rank; x may be changed."""
        return x

    def gather(self, x: Tensor, widths: list[int]) -> Tensor | None:
        """Concatenate x [n, widths[tp_rank]] of all ranks. Ranks other than TP rank 0 may get None."""
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Return TP rank 0's x on all ranks where `gather` does not return None."""
        return x


class MpiGroups(Groups):
    """One of an instance's several ranks, with the instance's communicators."""

    def __init__(self, layout: RankLayout, comms: InstanceComms) -> None:
        super().__init__(layout)
        from mpi4py import MPI

        from mpillm.comms.transport import Transport

        self._mpi = MPI
        self._tp = comms.tp
        self._instance, self._stages = (Transport(comm, comms.wakeup) for comm in (comms.instance, comms.pp))
        self._sampler = comms.instance.size - layout.tp_size  # the first rank of the last stage
        self._hidden: Tensor | None = None

    # --- tensors ---

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._tp.size == 1 or not x.numel():
            return x
        total = x.float().contiguous()  # float32: MPI has no bfloat16, and sums lose less precision
        with yielding_while_waiting():
            self._tp.Allreduce(self._mpi.IN_PLACE, (total.numpy(), self._mpi.FLOAT))
        return total.to(x.dtype)

    def gather(self, x: Tensor, widths: list[int]) -> Tensor | None:
        if self._tp.size == 1:
            return x
        sizes = [len(x) * width * x.element_size() for width in widths]
        gathered = np.empty(sum(sizes), np.uint8) if self._tp.rank == 0 else None
        own_bytes = x.contiguous().view(torch.uint8).numpy()
        with yielding_while_waiting():
            self._tp.Gatherv((own_bytes, self._mpi.BYTE), (gathered, sizes, None, self._mpi.BYTE), 0)
        if gathered is None:
            return None
        parts = torch.split(torch.from_numpy(gathered), sizes)
        return torch.cat(
            [part.view(x.dtype).view(len(x), width) for part, width in zip(parts, widths, strict=True)],
            dim=-1,
        )

    def send_hidden(self, x: Tensor) -> None:
        """Send x to the next stage; x must not change afterwards."""
        HIDDEN.send(self._stages, self._stages.rank + 1, x)

    def has_hidden(self) -> bool:
        """Return whether a message from the previous stage has arrived."""
        if self._hidden is None and (received := self._stages.poll()) is not None:
            self._hidden = HIDDEN.read(received.buffer)
        return self._hidden is not None

    def receive_hidden(self, n_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the rows whose arrival `has_hidden` reported: [n_rows, width]."""
        assert self._hidden is not None
        x, self._hidden = self._hidden, None
        return x.view(dtype).view(n_rows, width)

    def is_quiet(self) -> bool:
        """Return whether all of this rank's sends are complete."""
        for transport in (self._instance, self._stages):
            transport.reap()
        return min(self._instance.quiet_s(), self._stages.quiet_s()) == math.inf

    # --- plans and tokens ---

    def send_plan(self, step: Step) -> None:
        """Send the root rank's plan to all other ranks."""
        plan = PLAN.write(step)
        for rank in range(1, self._instance.comm.size):
            self._instance.send(rank, PLAN.tag, plan)

    def take_plan(self) -> Step | None:
        """Return the root rank's next plan, if it has arrived."""
        return PLAN.take(self._instance, 0, tries=1)

    def send_tokens(self, tokens: list[int]) -> None:
        """Send tokens from the first rank of the last stage to the root rank."""
        TOKENS.send(self._instance, 0, tokens)

    def take_tokens(self) -> list[int] | None:
        """Return the next step's tokens, if they have arrived."""
        return TOKENS.take(self._instance, self._sampler, tries=1)

    def send_moved(self, tickets: list[int]) -> None:
        """Report to the root rank that these transfers are done on this rank."""
        MOVED.send(self._instance, 0, tickets)

    def take_moved(self) -> list[int] | None:
        """Return the tickets that another rank has sent, if any have arrived."""
        return MOVED.take(self._instance, self._mpi.ANY_SOURCE, tries=1)
