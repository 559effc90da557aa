"""The other ranks of an instance in tests under mpirun: they compute until their leader says that it ends."""

from __future__ import annotations

import time

from mpi4py import MPI

from mpillm.cores.torch_core import TorchCore

STOP = 1  # the message's tag


def follow(core: TorchCore, world: MPI.Intracomm) -> None:
    """Run the leader's steps until it sends `STOP`, 120 s at most."""
    end = time.monotonic() + 120
    while core.has_work() or not world.Iprobe(0, STOP):
        if core.has_work():
            core.poll_responses()
        else:
            time.sleep(0.001)
        assert time.monotonic() < end
    world.recv(source=0, tag=STOP)
