"""What others used of the cores on which a test ran."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from launch.command import Command
from launch.owned_server import OwnedServer
from mpillm.report.validity_checks import doubts
from mpillm.telemetry.cpu_use import CpuMeter, CpuUse, other_load
from tests.helpers.support import wait_until

QUIET = {0: (5.0, 0.0), 1: (4.0, 0.0), 2: (10.0, 3.0)}  # a core that the ranks may not run on


def ranks(cores: dict[int, tuple[float, float]], own_s: float = 4.5) -> list[CpuUse]:
    return [CpuUse(10.0, own_s, (0,), cores), CpuUse(10.0, own_s, (1,), None)]


def loaded(ranks: list[CpuUse], host: str = "h1") -> dict[str, Any]:
    load = other_load(host, ranks)
    assert load is not None
    return load


def test_a_quiet_node() -> None:
    load = loaded(ranks(QUIET))
    assert load == {"host": "h1", "cores": 2, "ranks": 0.9, "others": 0.0, "stolen": 0.0, "disturbed_by": []}
    assert doubts({"other_load": [load]}) == []


def test_other_processes() -> None:
    load = loaded(ranks(QUIET | {1: (10.0, 0.0)}))
    assert (load["others"], load["disturbed_by"]) == (0.6, ["others"])
    expected = "disturbed: in the test other processes used 0.6 of the 2 cores of h1"
    assert doubts({"other_load": [loaded(ranks(QUIET), "h0"), load]}) == [expected]
    assert doubts({"other_load": [load]}, others_serve=True) == [], "they may be the servers"


def test_cpu_time_that_a_virtual_machines_host_takes() -> None:
    load = loaded(ranks(QUIET | {1: (4.0, 0.6)}))
    (note,) = doubts({"other_load": [load]}, others_serve=True)
    assert note == "disturbed: in the test the host of h1, a virtual machine, took 0.06 of its 2 cores"


def test_too_short_to_tell() -> None:
    """The kernel counts in steps of 10 ms."""
    short = [CpuUse(0.1, 0.05, (0, 1), {0: (0.09, 0.0), 1: (0.09, 0.0)})]
    assert loaded(short)["disturbed_by"] == []


BUSY = [sys.executable, "-c", "import time\nwhile time.process_time() < 20: pass"]


def test_a_process_of_others() -> None:
    """It is seen, and this one's own work is not taken for it."""
    meter = CpuMeter(of_node=True)
    started = subprocess.run(  # its parent ends at once
        ["sh", "-c", '"$@" >/dev/null 2>&1 & echo $!', "sh", *BUSY],
        capture_output=True,
        text=True,
        check=True,
    )
    try:
        worked_s, limit = time.process_time() + 0.5, time.monotonic() + 60
        while time.process_time() < worked_s and time.monotonic() < limit:
            pass
        use = meter.read()
    finally:
        os.kill(int(started.stdout), signal.SIGKILL)
    assert use.allowed == tuple(sorted(os.sched_getaffinity(0)))
    assert use.own_s > 0.3
    load = loaded([use])
    assert load["others"] > 0.25 and load["disturbed_by"][0] == "others"


def test_descendants_are_ours() -> None:
    """As TensorRT-LLM's workers, which a rank starts."""
    meter = CpuMeter(of_node=True)
    with subprocess.Popen(["sh", "-c", '"$@"; true', "sh", *BUSY], start_new_session=True) as child:
        try:
            wait_until(lambda: meter.read().own_s > 0.3, "its CPU time")
        finally:
            os.killpg(child.pid, signal.SIGKILL)


def test_a_server_that_a_rank_owns_is_ours(tmp_path: Path) -> None:
    """Below its guard, in a session of its own."""
    meter = CpuMeter(of_node=True)
    server = OwnedServer(Command((sys.executable, *BUSY[1:])), tmp_path / "server.log")
    try:
        wait_until(lambda: meter.read().own_s > 0.3, "its CPU time")
    finally:
        server.stop(0)


def test_a_system_that_does_not_say() -> None:
    assert other_load("h1", [CpuUse(10.0, 4.5, (0,), {})]) is None
    assert other_load("h1", [CpuUse(10.0, 4.5, (0,), None)]) is None
