"""How the embedded engine's threads wait for each other."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.helpers.support import ROOT

_LOADS = """
import os, sys
from mpillm.cores.torch_core import TorchCore
import mpillm.bench.bench_engine
assert "torch" not in sys.modules, "it has read its environment"
try:
    TorchCore.load(object.__new__(TorchCore))  # which comes to the import, and finds that it has no options
except AttributeError as error:
    print(error, file=sys.stderr)
print(os.environ.get("OMP_WAIT_POLICY"))
"""


@pytest.mark.parametrize("stated", [None, "active"])
def test_they_sleep_unless_the_user_wants_them_to_spin(stated: str | None) -> None:
    """Ranks share cores. What this process starts finds the user's choice."""
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    env |= {"OMP_DISPLAY_ENV": "true"} | ({"OMP_WAIT_POLICY": stated} if stated else {})
    said = subprocess.run(
        [sys.executable, "-c", _LOADS], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
    )
    assert said.stdout.strip() == str(stated), said.stderr
    assert f"OMP_WAIT_POLICY = '{(stated or 'passive').upper()}'" in said.stderr
