"""Rows that the ranks of a TP group put where all of them can read them: see `sum_kernels`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpillm.engine.parallel.peer_memory import share_memory

if TYPE_CHECKING:
    from mpi4py import MPI

PROGRAMS = 256  # of a sum's kernel, at most: so many run at once on a GPU with 132 SMs
FEW_ROWS = 32  # of which each number comes in a word of its own; at most PROGRAMS
# Of more than two ranks each reads the rows of all others, more bytes than NCCL's ring: few rows only.
_MOST_ROWS, _ROWS_AT_ONCE = 1024, 2048


@dataclass(frozen=True)
class SharedRows:
    """Room for the rows of a sum on each rank of a TP group.

    It begins with int32 flags [PROGRAMS, ranks] and words [2, ranks, FEW_ROWS, width]. Rows in the model's
    dtype [2, n_rows, width] follow.
    """

    rank: int
    n_rows: int  # in one kernel; a sum of more takes several
    addresses: Tensor  # int64 [ranks]: where each rank's room is
    turns: Tensor  # int32 [PROGRAMS + FEW_ROWS]: sums of each of this rank's programs, then those of words

    def takes(self, n_rows: int) -> bool:
        """Return whether a sum of so many rows is faster here than by NCCL."""
        n_ranks = len(self.addresses)
        return n_ranks == 2 or n_rows <= _MOST_ROWS // n_ranks

    @staticmethod
    def n_bytes(n_ranks: int, n_rows: int, width: int, dtype: torch.dtype) -> int:
        """Return the bytes of a rank's room."""
        words = PROGRAMS * n_ranks + 2 * n_ranks * FEW_ROWS * width
        return 4 * words + 2 * n_rows * width * dtype.itemsize

    @classmethod
    def of(cls, comm: MPI.Intracomm, width: int, dtype: torch.dtype) -> SharedRows | None:
        """Return room on PyTorch's current GPU and those of the other ranks, or None (see `share_memory`).

        Collective.
        """
        n_rows = _ROWS_AT_ONCE if comm.size == 2 else _MOST_ROWS // comm.size
        addresses = share_memory(comm, cls.n_bytes(comm.size, n_rows, width, dtype))
        if addresses is None:
            return None
        return cls.at(addresses, comm.rank, n_rows, torch.device("cuda", torch.cuda.current_device()))

    @classmethod
    def at(cls, addresses: list[int], rank: int, n_rows: int, device: torch.device) -> SharedRows:
        """Return the room at these addresses in this process, which is zero."""
        there = torch.tensor(addresses, dtype=torch.int64, device=device)
        return cls(rank, n_rows, there, torch.zeros(PROGRAMS + FEW_ROWS, dtype=torch.int32, device=device))
