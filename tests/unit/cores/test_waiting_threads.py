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
import benchmarks.engine
assert "torch" not in sys.modules, "it has read its environment"
try:
    TorchCore.load(object.__new__(TorchCore))  # which comes to the import, and finds that it has no options
except AttributeError as error:
    print(error, file=sys.stderr)
print({name: os.environ.get(name) for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")})
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("variables", "policy", "turns"),
    [
        ({}, "PASSIVE", "1000"),
        ({"OMP_WAIT_POLICY": "active"}, "ACTIVE", "30000000000"),
        ({"OMP_WAIT_POLICY": "passive"}, "PASSIVE", "0"),
        ({"GOMP_SPINCOUNT": "7"}, "PASSIVE", "7"),
    ],
)
def test_threads_spin_briefly_unless_the_user_sets_a_policy(
    variables: dict[str, str], policy: str, turns: str
) -> None:
    """Ranks share cores. Subprocesses get the user's environment."""
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    env = {name: value for name, value in os.environ.items() if name not in names}
    process = subprocess.run(
        [sys.executable, "-c", _LOADS],
        cwd=ROOT,
        env=env | {"OMP_DISPLAY_ENV": "verbose"} | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.stdout.strip() == str({name: variables.get(name) for name in names}), process.stderr
    assert f"OMP_WAIT_POLICY = '{policy}'" in process.stderr
    assert f"GOMP_SPINCOUNT = '{turns}'" in process.stderr
