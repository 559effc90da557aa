"""What a rank knows of itself before MPI."""

from __future__ import annotations

import os
import threading

import pytest

from mpillm.comms import start
from mpillm.comms.start import node_name
from mpillm.errors import ExitCode

# A task of srun, as recorded in tests/unit/launch/test_launcher.py.
TASK = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3"}


def test_the_node_that_slurm_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's node name counts, because two nodes may be on one host."""
    for name, value in (TASK | {"SLURMD_NODENAME": "node-7"}).items():
        monkeypatch.setenv(name, value)
    assert node_name() == "node-7"


@pytest.mark.parametrize("rank_0_says_it", [True, False])
def test_rank_1_says_who_is_missing_if_rank_0_does_not(
    monkeypatch: pytest.MonkeyPatch, rank_0_says_it: bool
) -> None:
    """Rank 0's child may take longer to find out; then it ends rank 1."""
    monkeypatch.setattr(start, "_SECOND_S", 0.1)
    monkeypatch.setattr(start, "_FINDS_OUT_S", 30.0 if rank_0_says_it else 0.3)
    monkeypatch.setattr(start, "stopped_ranks", lambda: "rank 0 is stopped")
    wait_end, done_end = os.pipe()
    if rank_0_says_it:
        threading.Timer(0.5, os.close, [done_end]).start()
    cause = start._cause_to_end(wait_end, 0.1, 1, os.getpid())
    os.close(wait_end)
    if rank_0_says_it:
        assert cause is None
        return
    os.close(done_end)
    text = "MPI_Init did not end within the deadline of 0.1 s: rank 0 is stopped"
    assert cause == (text, ExitCode.NOT_READY)
