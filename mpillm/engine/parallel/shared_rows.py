"""Memory for sums over the GPUs of a TP group: see `sum_kernels`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpillm.engine.parallel.peer_memory import share_memory

if TYPE_CHECKING:
    from mpi4py import MPI

PROGRAMS = 256  # limit for a sum's kernel: a GPU with 132 SMs runs as many simultaneously
FEW_ROWS = 32  # for up to so many rows, each number shares an int32 with the turn; at most PROGRAMS
_MAX_ROWS = 2048


@dataclass(frozen=True)
class SharedRows:
    """A buffer for the rows of a sum on each rank of a TP group.

    It starts with flags, int32 [PROGRAMS, ranks], and few rows with turns, int32 [2, ranks, FEW_ROWS, width].
    Next are other ranks' parts of this rank's rows, in the model's dtype [ranks, n_rows / ranks, width]. Last
    are other ranks' results: rows in that dtype [n_rows, width], and scales, float32 [n_rows].
    """

    rank: int
    n_rows: int  # of one kernel, a multiple of the number of ranks; a larger sum needs several kernels
    addresses: Tensor  # int64 [ranks]: of each rank's buffer
    turns: Tensor  # int32 [PROGRAMS + FEW_ROWS]: number of sums of each program, then of each of few rows

    @staticmethod
    def splits(n_rows: int, dtype: torch.dtype) -> bool:
        """Return whether the ranks share `n_rows` rows.

        If so, each rank updates the residual of only its own rows.
        """
        return n_rows > FEW_ROWS or dtype.itemsize != 2

    def own(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return `rows` (int64) of x, with zeros for rows of other ranks."""
        others = rows % len(self.addresses) != self.rank
        return x.index_select(0, rows).masked_fill_(others[:, None], 0)

    @staticmethod
    def n_bytes(n_ranks: int, n_rows: int, width: int, dtype: torch.dtype) -> int:
        """Return the bytes of a rank's buffer."""
        n_ints = PROGRAMS * n_ranks + 2 * n_ranks * FEW_ROWS * width
        return 4 * n_ints + 2 * n_rows * width * dtype.itemsize + 4 * n_rows

    @classmethod
    def of(cls, comm: MPI.Intracomm, width: int, dtype: torch.dtype) -> SharedRows | None:
        """Allocate buffers on PyTorch's current GPU of each rank; None if it fails (see `share_memory`).

        Collective.
        """
        n_rows = _MAX_ROWS // comm.size * comm.size
        addresses = share_memory(comm, cls.n_bytes(comm.size, n_rows, width, dtype))
        if addresses is None:
            return None
        return cls.at(addresses, comm.rank, n_rows, torch.device("cuda", torch.cuda.current_device()))

    @classmethod
    def at(cls, addresses: list[int], rank: int, n_rows: int, device: torch.device) -> SharedRows:
        """Wrap zeroed buffers at `addresses` in this process."""
        pointers = torch.tensor(addresses, dtype=torch.int64, device=device)
        return cls(rank, n_rows, pointers, torch.zeros(PROGRAMS + FEW_ROWS, dtype=torch.int32, device=device))
