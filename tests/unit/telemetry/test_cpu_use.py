"""What others used of the cores on which a test ran."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from mpillm.report.doubts import doubts
from mpillm.telemetry.cpu_use import CpuMeter, CpuUse, other_load

QUIET = {0: (5.0, 0.0), 1: (4.0, 0.0), 2: (10.0, 3.0)}  # a core that the ranks may not run on


def ranks(cores: dict[int, tuple[float, float]], own_s: float = 4.5) -> list[CpuUse]:
    return [CpuUse(10.0, own_s, (0,), cores), CpuUse(10.0, own_s, (1,), None)]


def test_a_quiet_node() -> None:
    load = other_load("h1", ranks(QUIET))
    assert load == {"host": "h1", "cores": 2, "ranks": 0.9, "others": 0.0, "stolen": 0.0, "disturbed_by": []}
    assert doubts({"other_load": [load]}) == []


def test_other_processes() -> None:
    load = other_load("h1", ranks(QUIET | {1: (10.0, 0.0)}))
    assert (load["others"], load["disturbed_by"]) == (0.6, ["others"])
    said = "disturbed: in the test other processes used 0.6 of the 2 cores of h1"
    assert doubts({"other_load": [other_load("h0", ranks(QUIET)), load]}) == [said]
    assert doubts({"other_load": [load]}, of_servers=True) == [], "they may be the servers"


def test_what_a_virtual_machines_host_takes() -> None:
    load = other_load("h1", ranks(QUIET | {1: (4.0, 0.6)}))
    (said,) = doubts({"other_load": [load]}, of_servers=True)
    assert said == "disturbed: in the test the host of h1, a virtual machine, took 0.06 of its 2 cores"


def test_too_short_to_tell() -> None:
    """The kernel counts in steps of 10 ms."""
    short = [CpuUse(0.1, 0.05, (0, 1), {0: (0.09, 0.0), 1: (0.09, 0.0)})]
    assert other_load("h1", short)["disturbed_by"] == []


def test_this_machine() -> None:
    """A busy process beside this one is seen, this one's own work is not taken for it."""
    meter = CpuMeter(of_node=True)
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            pass
        use = meter.read()
    finally:
        other.kill()
        other.wait()
    assert use.allowed == tuple(sorted(os.sched_getaffinity(0)))
    assert use.own_s > 0.3
    load = other_load("here", [use])
    assert load["others"] > 0.2 and "others" in load["disturbed_by"]
