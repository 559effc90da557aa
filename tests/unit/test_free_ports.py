"""Test processes on one machine never choose the same port."""

from __future__ import annotations

import random
import subprocess
import sys

from tests.helpers.ports import free_ports
from tests.helpers.support import ROOT

CHILD = "import random; random.seed(5); from tests.helpers.ports import free_ports; print(*free_ports(3))"


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
