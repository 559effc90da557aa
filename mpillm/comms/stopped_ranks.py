"""Detection of stopped ranks (SIGSTOP), before their heartbeats are missed."""

from __future__ import annotations

from collections.abc import Mapping

from launch.siblings import StoppedProcesses, how_it_is_stopped, runs


class StoppedRanks:
    """Finds the stopped ranks of this rank's host.

    The host's lowest rank that runs checks all its ranks, so others need to check only lower ranks.
    """

    def __init__(self, rank: int, pids: Mapping[int, int]) -> None:
        """`pids`: process ids of the ranks on this host, by rank."""
        self._lower = [pid for other, pid in pids.items() if other < rank]
        self._ranks = {pid: other for other, pid in pids.items() if other != rank}
        self._processes = StoppedProcesses()

    def look(self) -> list[tuple[int, str]]:
        """Return the stopped ranks that no earlier call has returned, with a description. Call this often."""
        if any(runs(pid) and not how_it_is_stopped(pid) for pid in self._lower):
            return []
        return [(self._ranks[pid], how) for pid, how in self._processes.look(self._ranks)]
