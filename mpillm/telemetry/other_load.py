"""CPU use of other processes and of the virtual machine's host during a measurement."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import psutil

T = TypeVar("T")

DISTURBS = 0.1  # CPU cores used by other processes, from which measurements are disturbed
STOLEN = 0.02  # CPU cores that the host of a virtual machine gives to others; only a part is reported
_ATTEMPTS = 3


@dataclass(frozen=True)
class Disturbance:
    """Average number of CPU cores that others used."""

    processes: float
    stolen: float  # by the host of this virtual machine

    @property
    def degree(self) -> float:
        """The use relative to the limits; above 1, measurements are disturbed."""
        return max(self.processes / DISTURBS, self.stolen / STOLEN)

    def note(self) -> str:
        """Return a text for the end of a line; "" if the use is below the limits."""
        if self.degree <= 1:
            return ""
        causes = [f"other processes used {self.processes:.1f} cores"] if self.processes > DISTURBS else []
        causes += [f"the host took {self.stolen:.2f} cores"] if self.stolen > STOLEN else []
        return f"; disturbed: {', '.join(causes)}"


def _read() -> tuple[float, float, float]:
    """Return the time, and the CPU seconds of other processes (without exited children) and of the host."""
    machine = psutil.cpu_times()
    stolen = float(getattr(machine, "steal", 0.0))
    idle = machine.idle + getattr(machine, "iowait", 0.0) + stolen
    usages = [resource.getrusage(which) for which in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    guest = getattr(machine, "guest", 0.0) + getattr(machine, "guest_nice", 0.0)  # also counted as user
    own = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    return time.monotonic(), float(sum(machine) - guest - idle - own), stolen


class OtherLoad:
    """Meter that starts when it is created. Our own processes are excluded after their exit."""

    def __init__(self, read: Callable[[], tuple[float, float, float]] = _read) -> None:
        self._read, self._before = read, read()

    def so_far(self) -> Disturbance:
        """Return the average use of others until now."""
        lasted, *used = (now - before for now, before in zip(self._read(), self._before, strict=True))
        return Disturbance(*(max(0.0, seconds) / max(1e-9, lasted) for seconds in used))


def measure_undisturbed(
    measure: Callable[[], T], meter: Callable[[], OtherLoad] = OtherLoad
) -> tuple[T, Disturbance]:
    """Return the result of `measure`, and the use of others meanwhile.

    If other processes disturb, measure again, at most twice. The host's use lasts for minutes, so further
    measurements do not avoid it.
    """
    best: tuple[T, Disturbance] | None = None
    for _ in range(_ATTEMPTS):
        load = meter()
        result = measure(), load.so_far()
        if best is None or result[1].degree < best[1].degree:
            best = result
        if result[1].processes <= DISTURBS:
            break
    assert best is not None
    return best
