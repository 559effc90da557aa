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
_ROWS_AT_ONCE = 2048


@dataclass(frozen=True)
class SharedRows:
    """Room for the rows of a sum on each rank of a TP group.

    It begins with int32 flags [PROGRAMS, ranks] and words [2, ranks, FEW_ROWS, width]. Then come the others'
    parts of this rank's rows, in the model's dtype [ranks, n_rows / ranks, width], and what the others have
    made of theirs: room for rows in that dtype [n_rows, width], and scales, float32 [n_rows].
    """

    rank: int
    n_rows: int  # in one kernel, a multiple of the ranks; a sum of more takes several
    addresses: Tensor  # int64 [ranks]: where each rank's room is
    turns: Tensor  # int32 [PROGRAMS + FEW_ROWS]: sums of each of this rank's programs, then those of words

    @staticmethod
    def splits(n_rows: int, dtype: torch.dtype) -> bool:
        """Return whether each rank has some of so many rows: then it updates only their residual."""
        return n_rows > FEW_ROWS or dtype.itemsize != 2

    def own(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return `rows` (int64) of x, zero where they are another rank's."""
        others = rows % len(self.addresses) != self.rank
        return x.index_select(0, rows).masked_fill_(others[:, None], 0)

    @staticmethod
    def n_bytes(n_ranks: int, n_rows: int, width: int, dtype: torch.dtype) -> int:
        """Return the bytes of a rank's room."""
        words = PROGRAMS * n_ranks + 2 * n_ranks * FEW_ROWS * width
        return 4 * words + 2 * n_rows * width * dtype.itemsize + 4 * n_rows

    @classmethod
    def of(cls, comm: MPI.Intracomm, width: int, dtype: torch.dtype) -> SharedRows | None:
        """Return room on PyTorch's current GPU and those of the other ranks, or None (see `share_memory`).

        Collective.
        """
        n_rows = _ROWS_AT_ONCE // comm.size * comm.size
        addresses = share_memory(comm, cls.n_bytes(comm.size, n_rows, width, dtype))
        if addresses is None:
            return None
        return cls.at(addresses, comm.rank, n_rows, torch.device("cuda", torch.cuda.current_device()))

    @classmethod
    def at(cls, addresses: list[int], rank: int, n_rows: int, device: torch.device) -> SharedRows:
        """Return the room at these addresses in this process, which is zero."""
        there = torch.tensor(addresses, dtype=torch.int64, device=device)
        return cls(rank, n_rows, there, torch.zeros(PROGRAMS + FEW_ROWS, dtype=torch.int32, device=device))
