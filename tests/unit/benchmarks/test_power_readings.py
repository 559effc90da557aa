"""What a GPU has drawn, with a stand-in for its driver."""

from __future__ import annotations

import math

import pytest

from benchmarks import power_readings
from benchmarks.power_readings import PowerReader, Reading
from mpillm.telemetry.gpu_meter import GPU_COLUMNS


def test_without_a_gpu_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(device: int) -> None:
        raise OSError(f"no GPU {device}")

    monkeypatch.setattr(power_readings, "GpuMeter", none)
    power = PowerReader()
    first, last = power.read(), power.read()
    assert last.at >= first.at and math.isnan(last.sm_mhz) and math.isnan(last.watts_since(first))


def test_what_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    class Meter:
        def __init__(self, device: int) -> None:
            assert device == 0

        def read(self) -> list[float]:
            said = {"energy_j": 5000.0, "sm_mhz": 1500.0}
            return [said.get(name, math.nan) for name in GPU_COLUMNS]

    monkeypatch.setattr(power_readings, "GpuMeter", Meter)
    read = PowerReader().read()
    assert (read.joules, read.sm_mhz) == (5000.0, 1500.0)
    assert read.watts_since(Reading(read.at - 2.0, 3600.0, math.nan)) == pytest.approx(700.0)
