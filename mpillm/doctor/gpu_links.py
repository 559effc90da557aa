"""NCCL between the GPUs of two ranks: latency and bandwidth."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from mpillm.doctor.network import LinkFound

if TYPE_CHECKING:
    from mpi4py import MPI

_TAG = 2
_LARGE = 64 << 20  # bytes
_TURNS = 5
_TRIPS = 50


def nccl_link(comm: MPI.Intracomm, partner: int, device: int, leads: bool, seconds: float) -> LinkFound:
    """Measure from `device` of this process to the partner's. Both ends call it; what fails is in the result.

    NCCL can wait for ever, so a thread asks it; after `seconds` that is left behind.
    """
    found: list[LinkFound] = []

    def work() -> None:
        try:
            found.append(_measure(comm, partner, device, leads))
        except Exception as error:  # noqa: BLE001 - told to rank 0, as a finding
            found.append(LinkFound(0, 0, 0, f"NCCL: {error}"))

    thread = threading.Thread(target=work, name="mpillm-doctor-nccl", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else LinkFound(0, 0, 0, f"NCCL did not end within {seconds:g} s")


def _measure(comm: MPI.Intracomm, partner: int, device: int, leads: bool) -> LinkFound:
    import torch

    from mpillm.engine.parallel.nccl import NcclComm

    torch.cuda.set_device(device)

    def tell(unique: bytes) -> bytes:
        buffer = np.frombuffer(unique, np.uint8).copy()
        if leads:
            comm.Send(buffer, partner, _TAG)
        else:
            comm.Recv(buffer, partner, _TAG)
        return buffer.tobytes()

    nccl = NcclComm(0 if leads else 1, 2, tell)
    other = 1 if leads else 0
    small, large = (torch.zeros(n, dtype=torch.uint8, device=f"cuda:{device}") for n in (64, _LARGE))

    def trip(x: torch.Tensor) -> None:
        for sends in (leads, not leads):
            (nccl.send if sends else nccl.receive)(x, other)

    def timed(x: torch.Tensor, n: int) -> float:
        trip(x)
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(n):
            trip(x)
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / (2 * n)

    return LinkFound(timed(small, _TRIPS), _LARGE / timed(large, _TURNS), 0.0)
