"""The description of a node: what is there, whatever machine this is."""

from __future__ import annotations

import json
import os

from mpillm.devices import Gpu
from mpillm.report.machine import describe_machine


def test_this_machine() -> None:
    machine = describe_machine(
        [Gpu("GPU-1", "NVIDIA H200", 141 << 30, 140 << 30)], ["pytest", "no-such-package"]
    )
    assert json.loads(json.dumps(machine)) == machine
    assert machine["gpus"] == [{"name": "NVIDIA H200", "memory_bytes": 141 << 30}]
    assert machine["memory_bytes"] > 1 << 28 and machine["storage"]["bytes"] > 1 << 28
    cpu = machine["cpu"]
    assert 1 <= cpu["sockets"] <= cpu["cores"] <= cpu["threads"] == os.cpu_count()
    assert machine["operating_system"] and machine["kernel"]
    assert machine["software"]["numpy"].count(".") == 2
    assert "pytest" in machine["software"] and "no-such-package" not in machine["software"]


def test_the_same_twice() -> None:
    assert describe_machine((), ()) == describe_machine((), ())
