"""What a rank knows of itself before MPI."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import cast

import pytest
from mpi4py import MPI

from launch.environment import EXIT_FILE, write_absent, write_ports
from launch.rank_registry import REGISTRY_ADDRESS
from mpillm.comms import start
from mpillm.comms.start import node_name
from mpillm.comms.transport import Transport
from mpillm.errors import ExitCode

# A task of srun, as recorded in tests/unit/launch/test_launcher.py.
TASK = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3"}


def test_the_node_that_slurm_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's node name counts, because two nodes may be on one host."""
    for name, value in (TASK | {"SLURMD_NODENAME": "node-7"}).items():
        monkeypatch.setenv(name, value)
    assert node_name() == "node-7"


@pytest.mark.parametrize("rank_0_reports", [True, False])
def test_rank_1_names_the_missing_rank_if_rank_0_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank_0_reports: bool
) -> None:
    """Rank 0's child may take longer to find out; then it ends rank 1."""
    monkeypatch.setenv(EXIT_FILE, str(tmp_path / "exit_code"))
    write_absent("rank 0 has not started", tmp_path / "exit_code")
    wait_end, done_end = os.pipe()
    if rank_0_reports:
        threading.Timer(0.5, os.close, [done_end]).start()
    diagnosis_s = 30.0 if rank_0_reports else 0.3
    cause = start._cause_to_end(wait_end, 0.1, 1, os.getpid(), 0.1, diagnosis_s)
    os.close(wait_end)
    if rank_0_reports:
        assert cause is None
        return
    os.close(done_end)
    text = "MPI_Init did not end within the deadline of 0.1 s: rank 0 has not started"
    assert cause == (text, ExitCode.NOT_READY)


IMPORT = "the import of the core's module (--core_type) has not ended"


@pytest.mark.parametrize(
    ("progress", "transports", "cause"),
    [
        (start._STARTED, "self,sm", f"{IMPORT} on rank 0 (pid {os.getpid()}) on "),
        (start._STARTED + start._IMPORTED, "self,sm", "OMPI_MCA_btl=self,sm leaves out tcp"),
        (start._STARTED + start._IMPORTED, "", f"MPI has started, but {IMPORT} on another rank"),
    ],
    ids=["its own import", "hosts that MPI does not connect", "another import"],
)
def test_why_a_start_does_not_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, progress: bytes, transports: str, cause: str
) -> None:
    """MPI_Init lets ranks pass that cannot communicate: that looks like an import that lasts too long."""
    monkeypatch.setenv(EXIT_FILE, str(tmp_path / "exit_code"))
    for name, value in {"RANK": "0", "SIZE": "2", "LOCAL_SIZE": "1"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.setenv("OMPI_MCA_btl", transports)
    write_ports([(1, "h2", "", 0, "")], "", tmp_path / "exit_code")
    wait_end, done_end = os.pipe()
    os.write(done_end, progress)
    ended = start._cause_to_end(wait_end, 0.1, 0, os.getpid())
    os.close(wait_end)
    os.close(done_end)
    assert ended is not None and ended[1] == ExitCode.NOT_READY
    assert ended[0].startswith("the deadline of 0.1 s (--join_deadline) has passed: ") and cause in ended[0]


class Broken:
    """A world in which a rank has ended."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def Dup(self) -> None:
        raise MPI.Exception(MPI.ERR_OTHER)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_ends_when_mpi_has_just_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int
) -> None:
    """Rank 0 names it; the others end without a message."""

    def leave(code: int) -> None:
        raise SystemExit(code)

    for name in (EXIT_FILE, REGISTRY_ADDRESS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(start, "_LAUNCHER_GRACE_S", 0.0)
    monkeypatch.setattr(start, "ended_here", lambda: {2})
    monkeypatch.setattr(Transport, "known_losses", lambda self: frozenset())
    with pytest.raises(SystemExit) as ended:
        start._duplicates(cast(MPI.Intracomm, Broken(rank)), 2)
    assert ended.value.code == ExitCode.INSTANCE_LOST
    message = "mpillm: failed in phase 'join'\n  MPI can't start: rank 2 has ended\n"
    assert capsys.readouterr().err == (message if rank == 0 else "")
