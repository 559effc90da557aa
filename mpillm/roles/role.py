"""Role: a rank's work in each phase. All roles of a rank share the rank's event loop."""

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
    """Base class. In each phase, the rank calls the phase's method once, then `poll` until `done(phase)`."""

    sends_requests: ClassVar[bool] = False  # to the leader: the rank polls this role before its other roles
    owns_processes: ClassVar[bool] = False  # has child processes: only the main thread may poll this role

    def load(self) -> None: ...
    def health(self) -> None: ...
    def warmup(self) -> None: ...
    def ready(self) -> None: ...
    def test(self) -> None: ...
    def drain(self) -> None: ...
    def stop(self) -> None: ...

    def poll(self) -> bool:
        """Do the available work, without waiting; return whether there was any work."""
        return False

    def quiet_s(self) -> float:
        """Return the seconds for which `poll` has no work unless a message or a wake-up arrives."""
        return math.inf

    def lost(self, instance: int) -> None:
        """Continue without this instance: all messages from and to its ranks are dropped."""

    def done(self, phase: Phase) -> bool:
        """Return whether this role's part of `phase` is done."""
        return True

    def measured(self) -> tuple[float, Metrics] | None:
        """Return seconds since the test's start, and the metrics of this role's instance at that time.

        The heartbeat's thread calls this.
        """
        return None

    def doing(self) -> str:
        """Return the progress of a phase before the test, or the cause of a wait, in words; "": unknown.

        The console prints all lines after the first only once. The heartbeat's thread calls this.
        """
        return ""

    def serves(self) -> dict[int, str]:
        """Return the URLs of this role's own servers, by server index. Called when the role has loaded."""
        return {}

    def find_servers(self, urls: Mapping[int, str]) -> None:
        """Use the run's own servers at these URLs. Called after all ranks have loaded."""

    def record(self, recorder: Recorder) -> None:
        """From now on, record in `recorder` when this rank computes. Called at the start of the test."""

    def report(self) -> dict[str, Any]:
        """Return this role's report on the test. Called at the end of phase drain."""
        return {}


class Importer(Role):
    """Imports a package before the rank's other roles load. The import is collective over MPI.COMM_WORLD."""

    def __init__(self, package: str) -> None:
        self._package = package

    def load(self) -> None:
        importlib.import_module(self._package)
