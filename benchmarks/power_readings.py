"""What a GPU has drawn between two moments of a measurement."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from mpillm.telemetry.gpu_meter import GPU_COLUMNS, GpuMeter


class Reading(NamedTuple):
    """A moment; joules and clock are NaN where the driver does not say."""

    at: float  # seconds
    joules: float
    sm_mhz: float

    def watts_since(self, earlier: Reading) -> float:
        """Return the mean between two readings."""
        return (self.joules - earlier.joules) / (self.at - earlier.at)


class PowerReader:
    """Reads this process's first GPU."""

    def __init__(self, meter: Callable[[int], GpuMeter] = GpuMeter) -> None:
        """`meter`: opens the driver's counters of a GPU; raises OSError where there is none."""
        try:
            self._meter: GpuMeter | None = meter(0)
        except OSError:
            self._meter = None

    def read(self) -> Reading:
        """Return the present moment."""
        if self._meter is None:
            return Reading(time.perf_counter(), math.nan, math.nan)
        read = dict(zip(GPU_COLUMNS, self._meter.read(), strict=True))
        return Reading(time.perf_counter(), read["energy_j"], read["sm_mhz"])
