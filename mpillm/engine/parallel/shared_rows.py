"""Rows that the ranks of a TP group put where all of them can read them: see `sum_kernels`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpillm.engine.parallel.peer_memory import share_memory

if TYPE_CHECKING:
    from mpi4py import MPI

PROGRAMS = 128  # of a sum's kernel, at most: all have to run at once, on every GPU


@dataclass(frozen=True)
class SharedRows:
    """Room for the rows of a sum on each rank of a TP group: int32 [PROGRAMS, ranks] flags, then the rows.

    The rows are [2, n_rows, width], in the model's dtype.
    """

    rank: int
    n_rows: int
    addresses: Tensor  # int64 [ranks]: where each rank's room is
    turns: Tensor  # int32 [PROGRAMS]: how many sums each program of this rank has computed

    @staticmethod
    def n_bytes(n_ranks: int, n_rows: int, width: int, dtype: torch.dtype) -> int:
        """Return the bytes of a rank's room."""
        return 4 * PROGRAMS * n_ranks + 2 * n_rows * width * dtype.itemsize

    @classmethod
    def of(cls, comm: MPI.Intracomm, n_rows: int, width: int, dtype: torch.dtype) -> SharedRows | None:
        """Return room on PyTorch's current GPU and those of the other ranks, or None (see `share_memory`).

        Collective.
        """
        addresses = share_memory(comm, cls.n_bytes(comm.size, n_rows, width, dtype))
        if addresses is None:
            return None
        return cls.at(addresses, comm.rank, n_rows, torch.device("cuda", torch.cuda.current_device()))

    @classmethod
    def at(cls, addresses: list[int], rank: int, n_rows: int, device: torch.device) -> SharedRows:
        """Return the room at these addresses in this process, which is zero."""
        there = torch.tensor(addresses, dtype=torch.int64, device=device)
        return cls(rank, n_rows, there, torch.zeros(PROGRAMS, dtype=torch.int32, device=device))
