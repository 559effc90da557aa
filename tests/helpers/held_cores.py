"""A core that keeps a phase of a run from ending, as the variables of `holds` say.

Every rank imports this module, so it can hold, and end, ranks without a core, too.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from mpi4py import MPI

from mpillm.comms.communicators import Communicators
from mpillm.comms.messages import Batch
from mpillm.cores.dummy import DummyCore
from tests.helpers.holds import GO, HOLD, VICTIM

_LONGEST_S = 120.0


def _wait_at(place: str, rank: int) -> None:
    """Do what the variables say of this place, if this is the rank."""
    if os.environ.get(VICTIM) == f"{place}:{rank}":
        os.kill(os.getpid(), signal.SIGKILL)
    if os.environ.get(HOLD) == f"{place}:{rank}":
        end = time.monotonic() + _LONGEST_S
        while not GO.exists() and time.monotonic() < end:
            time.sleep(0.01)


class Held(DummyCore):
    """Waits in a phase."""

    def load(self) -> None:
        _wait_at("load", self.config.rank)
        super().load()

    def warm_up_requests(self) -> Batch:
        _wait_at("warmup", self.config.rank)
        return super().warm_up_requests()

    def flush(self) -> None:
        super().flush()
        _wait_at("drain", self.config.rank)

    def notify_stop(self) -> None:
        _wait_at("stop", self.config.rank)
        super().notify_stop()


def _first(place: str, call: Any) -> Any:
    def called(*arguments: Any) -> Any:
        _wait_at(place, MPI.COMM_WORLD.rank)
        return call(*arguments)

    return called


Communicators.free = _first("free", Communicators.free)  # type: ignore[method-assign]
MPI.Finalize = _first("finalize", MPI.Finalize)
