"""Ranks that are stopped or killed, and interrupts: an end in time, one message, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from pathlib import Path

import pytest

from launch.signals import title
from tests.helpers.failures import ENDLESS, GRACE, GRACE_S, START_S, check_failure
from tests.helpers.holds import HELD, HOLD
from tests.helpers.support import (
    INSTANCE_LOST,
    NOT_READY,
    ROOT,
    Command,
    Starter,
    wait_until,
)


def start_endless(starter: Starter, phase: str, *options: object) -> Command:
    """Start four ranks, which stay in `phase`: 0 is the harness, 1 the leader, unless `options` say else."""
    if "--control_ranks" not in options:
        options = (*options, "--control_ranks", 2)
    if phase != "load":
        command = starter.start(4, *ENDLESS, *options)
        if phase != "start":
            command.wait_phase(phase)
        return command
    env = {"PYTHONPATH": str(ROOT)}
    command = starter.start(
        4,
        *ENDLESS,
        "--core_options",
        "load_s:100",
        *options,
        core="tests.helpers.plugin_cores:Loading",
        env=env,
    )
    for rank in (2, 3):
        wait_until((starter.folder / f"loading_{rank}").exists, f"rank {rank} to load")
    return command


def start_and_signal(starter: Starter, rank: int, phase: str, number: int, *options: object) -> Command:
    """Start four ranks, and signal one of them in `phase`."""
    command = start_endless(starter, phase, *options)
    if phase == "start":
        pid = command.wait_rank(rank)
    else:
        pid = next(
            entry["pid"]
            for entry in json.loads((command.log_dir / "ranks.json").read_text())
            if entry["rank"] == rank
        )
    os.kill(pid, number)
    return command


@pytest.mark.parametrize(
    ("mpi", "rank", "phase"),
    [
        pytest.param("openmpi", 3, "test", marks=pytest.mark.slow),
        ("openmpi", 1, "test"),
        ("mpich", 3, "test"),
    ],
    indirect=["mpi"],
)
def test_a_stopped_rank(both: Starter, rank: int, phase: str) -> None:
    """A rank that gets SIGSTOP sends no heartbeat either. Rank 0 names it before that."""
    command = start_and_signal(both, rank, phase, signal.SIGSTOP, "--heartbeat_timeout", 3)
    ended = command.end()
    check_failure(
        ended,
        INSTANCE_LOST,
        "(--heartbeat_timeout); pid ",
        rank=rank,
        phase=phase,
        within=START_S + 3 + GRACE_S + 3,
    )
    assert re.search(rf"^  stopped rank {rank} .*: is stopped: kill -CONT \d+;", ended.out, re.MULTILINE), (
        ended
    )


@pytest.mark.parametrize(
    ("mpi", "rank"),
    [pytest.param("openmpi", 2, marks=pytest.mark.slow), ("openmpi", 0), ("mpich", 2)],
    indirect=["mpi"],
)
def test_a_rank_that_stops_at_its_start(both: Starter, rank: int) -> None:
    """Before and in MPI_Init only the launcher's environment can tell who it is."""
    command = start_and_signal(
        both, rank, "start", signal.SIGSTOP, "--join_deadline", 4, "--heartbeat_timeout", 3
    )
    ended = command.end()
    assert ended.code in (NOT_READY, INSTANCE_LOST), repr(ended)
    assert "MPI_Init" in ended.err or re.search(rf"\brank {rank}\b", ended.err), repr(ended)
    if rank:
        named = rf"^  join    rank {rank} \(pid \d+\) is stopped: kill -CONT \d+$"
        assert re.search(named, ended.err, re.MULTILINE), ended
    assert ended.seconds < START_S + 4 + 3 + 2 * GRACE_S, repr(ended)


@pytest.mark.parametrize(
    ("mpi", "control"),
    [("openmpi", 1), pytest.param("openmpi", 2, marks=pytest.mark.slow), ("mpich", 1)],
    indirect=["mpi"],
)
def test_a_stopped_rank_0(both: Starter, control: int) -> None:
    options = ["--heartbeat_timeout", 3, "--control_ranks", control]
    command = start_and_signal(both, 0, "test", signal.SIGSTOP, *options)
    ended = command.end()
    ended.must(INSTANCE_LOST)
    assert re.search(r"rank 0 on \S+ \(pid (\d+)\) is stopped: kill -CONT \1\n", ended.err), repr(ended)
    assert ended.seconds < START_S + 3 + 4 * GRACE_S + 3, repr(ended)


def test_a_stopped_rank_0_while_the_next_rank_is_busy(one: Starter) -> None:
    """Its main thread does not look at rank 0."""
    options = ["--heartbeat_timeout", 3, "--grace", GRACE_S]
    command = one.start(3, *ENDLESS, *options, core=HELD, env={HOLD: "load:1", "PYTHONPATH": str(ROOT)})
    command.wait_phase("load")
    pid = json.loads((command.log_dir / "ranks.json").read_text())[0]["pid"]
    os.kill(pid, signal.SIGSTOP)
    ended = command.end()
    ended.must(INSTANCE_LOST)
    assert re.search(rf"rank 0 on \S+ \(pid {pid}\) is stopped: kill -CONT {pid}\n", ended.err), repr(ended)


# --- a rank that is killed ---


@pytest.mark.parametrize(
    ("mpi", "rank", "phase"),
    [(mpi, *case) for mpi in ("openmpi", "mpich") for case in ((3, "load"), (3, "test"), (1, "test"))],
    indirect=["mpi"],
)
def test_a_killed_rank(both: Starter, rank: int, phase: str) -> None:
    command = start_and_signal(both, rank, phase, signal.SIGKILL)
    ended = command.end()
    check_failure(
        ended, INSTANCE_LOST, "the process has ended", rank=rank, phase=phase, within=START_S + GRACE_S
    )
    assert not ended.left, "shared memory"


@pytest.mark.parametrize(
    ("mpi", "phase", "control"),
    [
        ("openmpi", "load", 1),
        pytest.param("openmpi", "load", 2, marks=pytest.mark.slow),
        ("openmpi", "test", 1),
        ("openmpi", "test", 2),
        ("mpich", "load", 2),
        ("mpich", "test", 1),
    ],
    indirect=["mpi"],
)
def test_a_killed_rank_0(both: Starter, phase: str, control: int) -> None:
    """Nobody is left to write result.json, so the launcher reports it. Rank 0 is the leader, too, or not."""
    options = ["--heartbeat_timeout", 3, "--control_ranks", control]
    command = start_and_signal(both, 0, phase, signal.SIGKILL, *options)
    ended = command.end()
    ended.must(INSTANCE_LOST)
    assert "rank 0 ended without an exit code" in ended.err
    (failure,) = ended.result["failures"]
    assert failure["rank"] == 0 and "killed or crashed" in failure["cause"], ended
    assert "mpirun ended with 0" not in failure["cause"], ended
    assert (ended.log_dir / "report.html").exists()
    assert ended.seconds < START_S + 3 + 2 * GRACE_S, repr(ended)


def test_a_killed_mpirun(both: Starter) -> None:
    command = both.start(3, *ENDLESS)
    command.wait_phase("test")
    for pid in command.pids():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() in ("prterun", "mpirun"):
                os.kill(pid, signal.SIGKILL)
    ended = command.end().must(INSTANCE_LOST)
    assert "was ended by signal 9 (SIGKILL), and so were all ranks" in ended.err, ended
    assert [failure["rank"] for failure in ended.result["failures"]] == [None], ended
    assert (ended.result["status"], ended.result["phase"]) == ("FAILED", "test"), ended
    assert "was ended by signal 9 (SIGKILL)" in (ended.log_dir / "report.html").read_text()


def test_a_killed_rank_makes_others_fail(both: Starter) -> None:
    """The others end, too, and are named neither as lost nor for errors that followed."""
    env = {"PYTHONPATH": str(ROOT), "MPILLM_TEST_RANK": "2"}
    ended = both.run(4, *ENDLESS, core="tests.helpers.plugin_cores:Orphaned", env=env)
    check_failure(ended, INSTANCE_LOST, "the process has ended", rank=2, phase="test")
    assert [failure["rank"] for failure in ended.result["failures"]] == [2]


@pytest.mark.slow  # as test_a_killed_rank
def test_a_core_that_exits(one: Starter) -> None:
    ended = one.run(4, *GRACE, "--core_options", "fault:exit,fault_rank:2,fault_at:5")
    check_failure(ended, INSTANCE_LOST, "the process has ended", rank=2, phase="test")


# --- interrupts ---


@pytest.mark.parametrize(
    ("phase", "number", "whole_group"),
    [
        ("load", signal.SIGINT, True),
        ("test", signal.SIGINT, False),
        ("test", signal.SIGTERM, True),
        ("test", signal.SIGUSR1, False),
    ],
)
def test_an_interrupt(both: Starter, phase: str, number: signal.Signals, whole_group: bool) -> None:
    command = start_endless(both, phase)
    if whole_group:
        command.signal_group(number)
    else:
        command.process.send_signal(number)
    ended = command.end()
    check_failure(ended, 128 + number, f"interrupted ({title(number)})", phase=phase)


@pytest.mark.parametrize("rank", [0, 3])
def test_an_interrupt_before_mpi_is_there(both: Starter, rank: int) -> None:
    """The interrupt comes as soon as a rank is seen, while it imports or is in MPI_Init."""
    command = both.start(4, *ENDLESS)
    command.wait_rank(rank)
    command.signal_group(signal.SIGINT)
    ended = command.end()
    ended.must(128 + signal.SIGINT)
    assert len(ended.messages) <= 1, repr(ended)
    assert "Traceback" not in ended.err, repr(ended)
    assert ended.seconds < START_S + GRACE_S, repr(ended)
