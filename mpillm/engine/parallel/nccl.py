"""NCCL through ctypes: collectives of a TP group and messages between GPUs, on PyTorch's current stream.

So CUDA graphs capture both. The library comes with PyTorch. The communicators are separate from PyTorch's;
MPI broadcasts their id. The host never waits here: operations complete in stream order. Tensors are
contiguous and on this rank's GPU.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpillm.engine.parallel.groups import MpiGroups
from mpillm.engine.parallel.shared_rows import SharedRows
from mpillm.engine.schedule.step import Step
from mpillm.engine.shape.layout import RankLayout

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpillm.comms.communicators import InstanceComms

_log = logging.getLogger(__name__)

_TYPES = {  # ncclDataType_t
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_SUM = 0


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


def _load() -> ctypes.CDLL:
    spec = importlib.util.find_spec("nvidia.nccl")
    folders = [Path(place) / "lib" for place in (spec.submodule_search_locations or ())] if spec else []
    for name in (*(str(folder / "libnccl.so.2") for folder in folders), "libnccl.so.2"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise RuntimeError(
        "an instance of several GPUs needs NCCL, and there is no libnccl.so.2 beside PyTorch or elsewhere:"
        " install PyTorch's CUDA build"
    )


class NcclComm:
    """A communicator over the GPUs of several ranks."""

    def __init__(self, rank: int, size: int, broadcast_id: Callable[[bytes], bytes]) -> None:
        """Join the communicator with PyTorch's current GPU. Collective.

        `broadcast_id` returns rank 0's argument on every rank. Raises RuntimeError with NCCL's message.
        """
        self._nccl = _load()
        self._nccl.ncclGetErrorString.restype = ctypes.c_char_p
        self.rank, self.size = rank, size
        unique = _UniqueId()
        if rank == 0:
            self._check(self._nccl.ncclGetUniqueId(ctypes.byref(unique)))
        unique = _UniqueId.from_buffer_copy(broadcast_id(bytes(unique)))
        self._comm = ctypes.c_void_p()
        self._check(self._nccl.ncclCommInitRank(ctypes.byref(self._comm), size, unique, rank))

    @classmethod
    def of(cls, comm: MPI.Intracomm) -> NcclComm:
        """Create a communicator of the ranks of an MPI communicator, in its order."""
        return cls(comm.rank, comm.size, lambda unique: comm.bcast(unique, 0))

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x over all ranks, in place."""
        at = _address(x)
        self._call("AllReduce", at, at, _count(x), _TYPES[x.dtype], _SUM)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Return [ranks, *x.shape]; x has the same shape on all ranks."""
        out = x.new_empty(self.size, *x.shape)
        self._call("AllGather", _address(x), _address(out), _count(x), _TYPES[x.dtype])
        return out

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        """Copy `root`'s x to all ranks, in place."""
        at = _address(x)
        self._call("Broadcast", at, at, _count(x), _TYPES[x.dtype], root)
        return x

    def send(self, x: Tensor, peer: int) -> None:
        """Send to a matching `receive` of the same size. Put operations of one exchange in `group`."""
        self._call("Send", _address(x), _count(x), _TYPES[x.dtype], peer)

    def receive(self, x: Tensor, peer: int) -> None:
        """Receive into x."""
        self._call("Recv", _address(x), _count(x), _TYPES[x.dtype], peer)

    @contextmanager
    def group(self) -> Iterator[None]:
        """Run the calls inside as one operation."""
        self._check(self._nccl.ncclGroupStart())
        try:
            yield
        finally:
            self._check(self._nccl.ncclGroupEnd())

    def _call(self, name: str, *arguments: Any) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self._check(getattr(self._nccl, f"nccl{name}")(*arguments, self._comm, stream))

    def _check(self, result: int) -> None:
        if result:
            raise RuntimeError(f"NCCL: {self._nccl.ncclGetErrorString(result).decode()}")


def _address(x: Tensor) -> ctypes.c_void_p:
    assert x.is_contiguous() and x.is_cuda
    return ctypes.c_void_p(x.data_ptr())


def _count(x: Tensor) -> ctypes.c_size_t:
    return ctypes.c_size_t(x.numel())


class NcclGroups(MpiGroups):
    """Sends tensors over NCCL, from GPU to GPU; plans and tokens over MPI.

    `gather` returns the result on every rank. The stream, not the host, waits for a stage's input.
    """

    def __init__(self, layout: RankLayout, comms: InstanceComms) -> None:
        super().__init__(layout, comms)
        self._tp_gpus = NcclComm.of(comms.tp) if layout.tp_size > 1 else None
        self._pp_gpus = NcclComm.of(comms.pp) if layout.pp_size > 1 else None
        if self._pp_gpus is not None:
            self._meet_neighbours(self._pp_gpus)

    @staticmethod
    def _meet_neighbours(stages: NcclComm) -> None:
        """Exchange first messages while ranks are idle, since the first message makes both hosts wait."""
        sent, received = torch.zeros(2, 1, device="cuda")
        with stages.group():
            if stages.rank + 1 < stages.size:
                stages.send(sent, stages.rank + 1)
            if stages.rank > 0:
                stages.receive(received, stages.rank - 1)

    def share_rows(self, width: int, dtype: torch.dtype) -> None:
        if self.layout.tp_size > 1 and self.layout.pp_size == 1:
            self.shared_rows = SharedRows.of(self._tp, width, dtype)
            if self.shared_rows is None:
                _log.warning("the GPUs of this instance do not reach each other's memory: NCCL adds all rows")

    def all_reduce(self, x: Tensor) -> Tensor:
        return x if self._tp_gpus is None or not x.numel() else self._tp_gpus.all_reduce(x)

    def gather(self, x: Tensor, widths: list[int]) -> Tensor | None:
        if self._tp_gpus is None:
            return x
        padded = x.new_zeros(len(x), max(widths))
        padded[:, : x.shape[1]] = x
        return torch.cat(
            [part[:, :width] for part, width in zip(self._tp_gpus.all_gather(padded), widths, strict=True)],
            dim=1,
        )

    def broadcast(self, x: Tensor) -> Tensor:
        return x if self._tp_gpus is None else self._tp_gpus.broadcast(x, 0)

    def send_plan(self, step: Step) -> None:
        """Send the plan and wait for its delivery.

        Later, this host may block on its GPU, which waits for the other ranks' GPUs.
        """
        super().send_plan(step)
        self._instance.flush(math.inf)

    def send_hidden(self, x: Tensor) -> None:
        assert self._pp_gpus is not None
        self._pp_gpus.send(x.contiguous(), self._pp_gpus.rank + 1)

    def has_hidden(self) -> bool:
        return True

    def receive_hidden(self, n_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert self._pp_gpus is not None
        x = torch.empty(n_rows, width, dtype=dtype, device=device)
        self._pp_gpus.receive(x, self._pp_gpus.rank - 1)
        return x
