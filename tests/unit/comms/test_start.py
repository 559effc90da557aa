"""What a rank knows of itself before MPI."""

from __future__ import annotations

import pytest

from mpillm.comms.start import node_name

# A task of srun, as recorded in tests/unit/launch/test_launcher.py.
TASK = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3"}


def test_the_node_that_slurm_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's node name counts, because two nodes may be on one host."""
    for name, value in (TASK | {"SLURMD_NODENAME": "node-7"}).items():
        monkeypatch.setenv(name, value)
    assert node_name() == "node-7"
