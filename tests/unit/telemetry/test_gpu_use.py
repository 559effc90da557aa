"""Which processes of others were on the GPUs of a test, with a stand-in for their driver."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from mpillm.report.validity_checks import doubts
from mpillm.telemetry.gpu_meter import GpuMeter, GpuUse, GpuWatch, other_processes

OURS = os.getpid()


class Nvml:
    """Answers as NVML does: what a call writes goes through its pointers."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self.code = 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: object, count: Any, found: Any) -> int:
        room, count._obj.value = count._obj.value, len(self.pids)
        if self.code or room < len(self.pids):
            return self.code or 7
        for i, pid in enumerate(self.pids):
            found[i].pid, found[i].used_bytes = pid, 1 << 30
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: object, handle: object) -> int:
        return 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        """Have no other numbers of a GPU."""
        if name.endswith("_v3"):
            raise AttributeError(name)
        return lambda *_: 3


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Nvml()


def test_what_a_rank_sees(nvml: Any) -> None:
    """At both ends of the test; what it has started is its own."""
    nvml.pids = [OURS, 11]
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as worker:
        watch = GpuWatch("GPU-a", GpuMeter(0, nvml))
        nvml.pids = [OURS, worker.pid, *range(100_000, 100_100)]
        use = watch.read()
        worker.communicate()
    assert use is not None and use.all == {11, *nvml.pids}
    assert {OURS, worker.pid} <= use.own, "with what other tests of this process have started"
    assert not use.own & {11, *range(100_000, 100_100)}


@pytest.mark.parametrize("how", ["an error", "an old driver"])
def test_a_driver_that_does_not_say(nvml: Any, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "an error":
        nvml.code = 3
    else:
        monkeypatch.delattr(Nvml, "nvmlDeviceGetComputeRunningProcesses_v3")
    assert GpuWatch("GPU-a", GpuMeter(0, nvml)).read() is None


def use(uuid: str, seen: set[int], own: set[int]) -> GpuUse:
    return GpuUse(uuid, frozenset(seen), frozenset(own))


def test_ranks_are_no_others_to_each_other() -> None:
    ranks = [use("GPU-a", {1, 2}, {1}), use("GPU-b", {2, 7}, {2})]
    found = other_processes("h", ranks)
    assert found == [{"host": "h", "gpu": "GPU-b", "pids": [7]}]
    (note,) = doubts({"other_gpu_processes": found})
    assert note == "disturbed: other work was on GPU-b of h when the test started or ended: process 7"
    found = other_processes("h", [use("GPU-a", {1, *range(20, 40)}, {1})])
    assert doubts({"other_gpu_processes": found})[0].endswith("processes 20, 21, 22, 23, 24, 25, 26, 27")


def test_ids_of_another_namespace_say_nothing() -> None:
    """As in a container, where the rank itself is not among them."""
    assert other_processes("h", [use("GPU-a", {4711}, {12})]) == []
