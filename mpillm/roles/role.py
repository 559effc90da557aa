"""A role: what a rank does in each phase. Roles on the same rank share its event loop."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from mpillm.cores.base import Metrics
    from mpillm.phases import Phase
    from mpillm.telemetry.recorder import Recorder


class Role:
    """Has a method per phase, called once; then `poll` is called until `done(phase)`."""

    asks: ClassVar[bool] = False  # the leader answers it: its rank polls it first
    owns: ClassVar[bool] = False  # processes, which are the main thread's alone

    def load(self) -> None: ...
    def health(self) -> None: ...
    def warmup(self) -> None: ...
    def ready(self) -> None: ...
    def test(self) -> None: ...
    def drain(self) -> None: ...
    def stop(self) -> None: ...

    def poll(self) -> bool:
        """Do what there is to do, without waiting; return whether there was anything."""
        return False

    def quiet_s(self) -> float:
        """Return for how many seconds `poll` finds nothing unless a message comes, or the doorbell rings."""
        return math.inf

    def lost(self, instance: int) -> None:
        """Go on without this instance: its rank takes no message any more, and sends none."""

    def done(self, phase: Phase) -> bool:
        """Return whether this role's part of `phase` is done."""
        return True

    def measured(self) -> tuple[float, Metrics] | None:
        """Return the seconds of the test, and the metrics by then of the instance that this role leads.

        The heartbeat's thread calls this.
        """
        return None

    def doing(self) -> str:
        """Return how far a phase before the test has come, or what it waits for, in a few words; "": unknown.

        What stands below the first line is told once. The heartbeat's thread calls this.
        """
        return ""

    def serves(self) -> dict[int, str]:
        """Return, once it has loaded, the URLs of the servers that this role owns, by their index."""
        return {}

    def find_servers(self, urls: Mapping[int, str]) -> None:
        """Hear where the run's own servers are, once all ranks have loaded."""

    def record(self, recorder: Recorder) -> None:
        """Note in `recorder`, from the start of the test on, when this rank computes."""

    def report(self) -> dict[str, Any]:
        """Return what to tell rank 0 about the test once this rank has drained."""
        return {}


class Importer(Role):
    """Imports a package before any role of its rank loads: the import waits for all of MPI.COMM_WORLD."""

    def __init__(self, package: str) -> None:
        self._package = package

    def load(self) -> None:
        importlib.import_module(self._package)
