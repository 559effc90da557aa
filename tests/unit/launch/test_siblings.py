"""The ranks of this job on this host, also those that can't speak."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from launch.siblings import describe_rank, ranks_here, siblings, stopped_ranks


def test_a_stopped_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"PMIX_NAMESPACE": f"test-{os.getpid()}", "OMPI_COMM_WORLD_SIZE": "3"}
    for name, value in (job | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}).items():
        monkeypatch.setenv(name, value)
    ranks = {
        rank: subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"],
            env={**os.environ, "OMPI_COMM_WORLD_RANK": str(rank)},
        )
        for rank in (1, 2)
    }
    try:
        ranks[2].send_signal(signal.SIGSTOP)
        end = time.monotonic() + 30
        while "rank 2" not in stopped_ranks() and time.monotonic() < end:
            time.sleep(0.01)
        assert stopped_ranks() == f"rank 2 (pid {ranks[2].pid} is stopped: kill -CONT {ranks[2].pid})"
        assert {rank: siblings()[rank].pid for rank in ranks} == {r: p.pid for r, p in ranks.items()}
        assert describe_rank(1) == f" (pid {ranks[1].pid} runs)"
        assert (describe_rank(9), ranks_here()) == ("", 3)
    finally:
        for process in ranks.values():
            process.kill()
            process.wait()


def test_without_a_launcher_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("OMPI_", "PMI", "PMIX_", "SLURM_")):
            monkeypatch.delenv(name)
    assert (siblings(), stopped_ranks(), describe_rank(0), ranks_here()) == ({}, "", "", None)
