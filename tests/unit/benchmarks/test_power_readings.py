"""What a GPU has drawn, with a stand-in for its driver."""

from __future__ import annotations

import math

import pytest

from benchmarks.power_readings import PowerReader, Reading
from mpillm.telemetry.gpu_meter import GPU_COLUMNS, GpuMeter


def test_without_a_gpu_nothing_is_known() -> None:
    def none(device: int) -> GpuMeter:
        raise OSError(f"no GPU {device}")

    power = PowerReader(none)
    first, last = power.read(), power.read()
    assert last.at >= first.at and math.isnan(last.sm_mhz) and math.isnan(last.watts_since(first))


def test_a_reading_has_the_values_of_the_driver() -> None:
    class Meter(GpuMeter):
        def __init__(self, device: int) -> None:
            assert device == 0

        def read(self) -> tuple[float, ...]:
            values = {"energy_j": 5000.0, "sm_mhz": 1500.0}
            return tuple(values.get(name, math.nan) for name in GPU_COLUMNS)

    read = PowerReader(Meter).read()
    assert (read.joules, read.sm_mhz) == (5000.0, 1500.0)
    assert read.watts_since(Reading(read.at - 2.0, 3600.0, math.nan)) == pytest.approx(700.0)
