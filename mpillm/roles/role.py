"""Role: a rank's work in each phase. Roles of the same rank share its event loop."""

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
    """Base class with a method per phase, which is called once. Then `poll` is called until `done(phase)`."""

    sends_requests: ClassVar[bool] = False  # to the leader: its rank polls it first
    owns_processes: ClassVar[bool] = False  # for which only the main thread may poll it

    def load(self) -> None: ...
    def health(self) -> None: ...
    def warmup(self) -> None: ...
    def ready(self) -> None: ...
    def test(self) -> None: ...
    def drain(self) -> None: ...
    def stop(self) -> None: ...

    def poll(self) -> bool:
        """Do the available work, without waiting; return whether there was any."""
        return False

    def quiet_s(self) -> float:
        """Return the seconds for which `poll` has no work without a message or a wake-up."""
        return math.inf

    def lost(self, instance: int) -> None:
        """Continue without this instance: its ranks receive and send no more messages."""

    def done(self, phase: Phase) -> bool:
        """Return whether this role's part of `phase` is done."""
        return True

    def measured(self) -> tuple[float, Metrics] | None:
        """Return the seconds of the test, and the metrics of this role's instance at that time.

        The heartbeat's thread calls this.
        """
        return None

    def doing(self) -> str:
        """Return the progress of a phase before the test, or what it waits for, in a few words; "": unknown.

        Text below the first line is printed once. The heartbeat's thread calls this.
        """
        return ""

    def serves(self) -> dict[int, str]:
        """Return the URLs of the servers that this role owns, by index, after it has loaded."""
        return {}

    def find_servers(self, urls: Mapping[int, str]) -> None:
        """Use the run's own servers at these URLs. Called after all ranks have loaded."""

    def record(self, recorder: Recorder) -> None:
        """From the start of the test on, record in `recorder` when this rank computes."""

    def report(self) -> dict[str, Any]:
        """Return this rank's report on the test, after it has drained."""
        return {}


class Importer(Role):
    """Imports a package before any role of its rank loads: the import waits for all of MPI.COMM_WORLD."""

    def __init__(self, package: str) -> None:
        self._package = package

    def load(self) -> None:
        importlib.import_module(self._package)
