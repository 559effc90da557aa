"""How much of this machine's CPUs others use while runs of ours are measured."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import psutil

T = TypeVar("T")

DISTURBS = 0.1  # cores that other processes use: from there on figures are disturbed
STOLEN = 0.02  # cores that the host of a virtual machine gives to others: little is seen of what slows
_ATTEMPTS = 3


@dataclass(frozen=True)
class Disturbance:
    """What others used meanwhile, in cores on average."""

    processes: float
    stolen: float  # by the host of this virtual machine

    @property
    def degree(self) -> float:
        """How much it is beside what is passed over; above 1 figures are disturbed."""
        return max(self.processes / DISTURBS, self.stolen / STOLEN)

    def said(self) -> str:
        """Return it as the end of a line; "" if it does not disturb."""
        if self.degree <= 1:
            return ""
        said = [f"other processes used {self.processes:.1f} cores"] if self.processes > DISTURBS else []
        said += [f"the host took {self.stolen:.2f} cores"] if self.stolen > STOLEN else []
        return f"; disturbed: {', '.join(said)}"


class OtherLoad:
    """Counts from its making on. Processes of ours count when they have ended."""

    def __init__(self) -> None:
        self._since, self._before = time.monotonic(), _others_s()

    def so_far(self) -> Disturbance:
        """Return what others have used on average until now."""
        lasted = max(1e-9, time.monotonic() - self._since)
        used = [
            max(0.0, now - before) / lasted for now, before in zip(_others_s(), self._before, strict=True)
        ]
        return Disturbance(*used)


def least_disturbed(measure: Callable[[], T]) -> tuple[T, Disturbance]:
    """Return what `measure` returns, and what others used meanwhile.

    While other processes disturb, it is measured again, twice at most. What the host takes goes on for
    minutes: measuring again does not escape it.
    """
    best: tuple[T, Disturbance] | None = None
    for _ in range(_ATTEMPTS):
        load = OtherLoad()
        found = measure(), load.so_far()
        if best is None or found[1].degree < best[1].degree:
            best = found
        if found[1].processes <= DISTURBS:
            break
    assert best is not None
    return best


def _others_s() -> tuple[float, float]:
    """Return the CPU seconds of other processes (but for this one's ended children), and of the host."""
    machine = psutil.cpu_times()
    stolen = float(getattr(machine, "steal", 0.0))
    idle = machine.idle + getattr(machine, "iowait", 0.0) + stolen
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    guest = getattr(machine, "guest", 0.0) + getattr(machine, "guest_nice", 0.0)  # counted as user, too
    ours = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    return float(sum(machine) - guest - idle - ours), stolen
