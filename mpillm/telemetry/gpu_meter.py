"""Power, energy, clocks, temperature, memory and load of a GPU, from NVML."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mpillm.devices import Memory, open_nvml, visible_handles
from mpillm.telemetry.cpu_use import descendants


class GpuUse(NamedTuple):
    """Processes on a rank's GPU during a test."""

    uuid: str
    all: frozenset[int]  # process ids
    own: frozenset[int]  # of this rank and its descendants


class GpuWatch:
    """Reads the processes of a GPU when it is created, and in `read`."""

    def __init__(self, uuid: str, meter: GpuMeter) -> None:
        self._uuid, self._meter = uuid, meter
        self._first = meter.processes()
        self._own = _own()

    def read(self) -> GpuUse | None:
        """Return the processes of both times; None if the driver does not report them."""
        if self._first is None or (last := self._meter.processes()) is None:
            return None
        return GpuUse(self._uuid, self._first | last, self._own | _own())


def other_processes(host: str, ranks: Sequence[GpuUse]) -> list[dict[str, Any]]:
    """Return for `result.json` the GPUs of a node that other processes also used, with their ids.

    A GPU is omitted if the driver reports none of the ranks' processes on it. Its ids are then of another
    namespace, as in a container.
    """
    own = frozenset[int]().union(*(rank.own for rank in ranks))
    on: dict[str, frozenset[int]] = {}
    for rank in ranks:
        on[rank.uuid] = on.get(rank.uuid, frozenset()) | rank.all
    return [
        {"host": host, "gpu": uuid, "pids": sorted(pids - own)}
        for uuid, pids in on.items()
        if pids & own and pids - own
    ]


def _own() -> frozenset[int]:
    return frozenset({os.getpid(), *descendants("self")})


GPU_COLUMNS = (*("power_w", "energy_j", "sm_mhz", "memory_mhz", "temperature_c", "memory_bytes", "load"),)
# Numbers of nvml.h.
_CLOCK_SM, _CLOCK_MEMORY, _TEMPERATURE_GPU = 1, 2, 0


_TOO_SMALL = 7  # NVML_ERROR_INSUFFICIENT_SIZE
_MAX_PROCESSES = 64


class _Process(ctypes.Structure):
    """NVML's nvmlProcessInfo_t, since driver 510."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class GpuMeter:
    """Reads one GPU. Values that its driver does not report are NaN. The handle stays open."""

    def __init__(self, device: int, nvml: ctypes.CDLL | None = None) -> None:
        """`device`: as this process numbers GPUs. Raises OSError if NVML can't read the GPU."""
        nvml = nvml or open_nvml()
        handles = visible_handles(nvml) if nvml is not None else []
        if nvml is None or device >= len(handles):
            raise OSError(f"NVML shows no GPU {device}")
        self._nvml, self._handle = nvml, handles[device]
        try:
            self.read()
        except AttributeError as error:
            raise OSError(f"this NVML is too old: {error}") from None

    def read(self) -> tuple[float, ...]:
        """Return `GPU_COLUMNS`: watts, joules since the driver started, MHz, °C, bytes, 0 to 1."""
        call, memory, load = self._number, Memory(), _Utilization()
        nvml = self._nvml
        got_memory = nvml.nvmlDeviceGetMemoryInfo(self._handle, ctypes.byref(memory)) == 0
        got_load = nvml.nvmlDeviceGetUtilizationRates(self._handle, ctypes.byref(load)) == 0
        return (
            call(nvml.nvmlDeviceGetPowerUsage) / 1e3,
            call(nvml.nvmlDeviceGetTotalEnergyConsumption, long=True) / 1e3,
            call(nvml.nvmlDeviceGetClockInfo, _CLOCK_SM),
            call(nvml.nvmlDeviceGetClockInfo, _CLOCK_MEMORY),
            call(nvml.nvmlDeviceGetTemperature, _TEMPERATURE_GPU),
            float(memory.used) if got_memory else math.nan,
            load.gpu / 100 if got_load else math.nan,
        )

    def processes(self) -> frozenset[int] | None:
        """Return the ids of the processes on the GPU; None if its driver does not report them.

        In a container, they may be ids of its host.
        """
        size = _MAX_PROCESSES
        while True:
            count, processes = ctypes.c_uint(size), (_Process * size)()
            try:
                code = self._nvml.nvmlDeviceGetComputeRunningProcesses_v3(
                    self._handle, ctypes.byref(count), processes
                )
            except AttributeError:  # an older driver
                return None
            if code != _TOO_SMALL or size != _MAX_PROCESSES:
                return None if code else frozenset(one.pid for one in processes[: count.value])
            size = 2 * count.value

    def _number(self, function: Callable[..., int], *args: int, long: bool = False) -> float:
        value = ctypes.c_ulonglong() if long else ctypes.c_uint()
        failed = function(self._handle, *map(ctypes.c_uint, args), ctypes.byref(value))
        return math.nan if failed else float(value.value)
