"""Test processes on one machine never choose the same port."""

from __future__ import annotations

import random
import subprocess
import sys

from tests.helpers.ports import free_ports
from tests.helpers.scripted_server import ScriptedServer
from tests.helpers.support import ROOT

CHILD = "import random; random.seed(5); from tests.helpers.ports import free_ports; print(*free_ports(3))"


def test_the_port_of_a_stopped_server_stays_reserved() -> None:
    """A client may still try to reach it, and must not find another test's server there."""
    state = random.getstate()
    random.seed(7)
    with ScriptedServer() as server:
        port = int(server.address.rpartition(":")[2])
    random.seed(7)
    assert port < 32_768, "the kernel gives others to the next one who asks"
    assert free_ports(1) != [port]
    random.setstate(state)


def test_two_processes_choose_different_ports() -> None:
    """Both draw the same random numbers, and no server has bound a port yet."""
    state = random.getstate()
    random.seed(5)
    own = free_ports(3)
    random.setstate(state)
    child = subprocess.run(
        [sys.executable, "-c", CHILD], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    others = [int(port) for port in child.stdout.split()]
    assert len(others) == 3 and not set(own) & set(others)
