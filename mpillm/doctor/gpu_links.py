"""Latency and bandwidth of NCCL between the GPUs of two ranks."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from mpillm.doctor.network import LinkMeasurement

if TYPE_CHECKING:
    from mpi4py import MPI

_TAG = 2
_LARGE = 64 << 20  # bytes
_TURNS = 5
_TRIPS = 50


def nccl_link(comm: MPI.Intracomm, partner: int, device: int, leads: bool, seconds: float) -> LinkMeasurement:
    """Measure from `device` of this process to the partner's. Both ends call it; failures are in the result.

    NCCL can block forever, so it runs in a thread, which is left behind after `seconds`.
    """
    results: list[LinkMeasurement] = []

    def work() -> None:
        try:
            results.append(_measure(comm, partner, device, leads))
        except Exception as error:  # noqa: BLE001 - reported to rank 0 as a finding
            results.append(LinkMeasurement(0, 0, 0, f"NCCL: {error}"))

    thread = threading.Thread(target=work, name="mpillm-doctor-nccl", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else LinkMeasurement(0, 0, 0, f"NCCL did not end within {seconds:g} s")


def _measure(comm: MPI.Intracomm, partner: int, device: int, leads: bool) -> LinkMeasurement:
    import torch

    from mpillm.engine.parallel.nccl import NcclComm

    torch.cuda.set_device(device)

    def exchange_id(id_bytes: bytes) -> bytes:
        buffer = np.frombuffer(id_bytes, np.uint8).copy()
        if leads:
            comm.Send(buffer, partner, _TAG)
        else:
            comm.Recv(buffer, partner, _TAG)
        return buffer.tobytes()

    nccl = NcclComm(0 if leads else 1, 2, exchange_id)
    peer = 1 if leads else 0
    small, large = (torch.zeros(n, dtype=torch.uint8, device=f"cuda:{device}") for n in (64, _LARGE))

    def trip(x: torch.Tensor) -> None:
        for sends in (leads, not leads):
            (nccl.send if sends else nccl.receive)(x, peer)

    def timed(x: torch.Tensor, n: int) -> float:
        trip(x)
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(n):
            trip(x)
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / (2 * n)

    return LinkMeasurement(timed(small, _TRIPS), _LARGE / timed(large, _TURNS), 0.0)
