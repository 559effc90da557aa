"""How much of this machine's CPUs others use while runs of ours are measured."""

from __future__ import annotations

import resource
import time

import psutil

DISTURBS = 0.1  # cores: from there on figures are disturbed


class OtherLoad:
    """Counts from its making on. Processes of ours count when they have ended."""

    def __init__(self) -> None:
        self._since, self._before = time.monotonic(), _others_s()

    def cores(self) -> float:
        """Return how many cores others have used on average."""
        lasted = time.monotonic() - self._since
        return max(0.0, _others_s() - self._before) / lasted if lasted > 0 else 0.0

    def said(self) -> str:
        """Return that as the end of a line; "" if it does not disturb."""
        cores = self.cores()
        return f"; disturbed: other processes used {cores:.1f} cores" if cores > DISTURBS else ""


def _others_s() -> float:
    """Return the CPU seconds of all processes but this one and its children that have ended."""
    machine = psutil.cpu_times()
    idle = machine.idle + getattr(machine, "iowait", 0.0) + getattr(machine, "steal", 0.0)
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    guest = getattr(machine, "guest", 0.0) + getattr(machine, "guest_nice", 0.0)  # counted as user, too
    return float(sum(machine) - guest - idle - sum(usage.ru_utime + usage.ru_stime for usage in usages))
