"""Ranks that are stopped are reported by the lowest rank of their host that runs."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from launch.siblings import process_state
from mpillm.comms.stopped_ranks import StoppedRanks
from tests.helpers.support import wait_until

RANKS = (2, 3, 5)


@pytest.fixture
def processes() -> Iterator[dict[int, subprocess.Popen[bytes]]]:
    started = {rank: subprocess.Popen(["sleep", "60"]) for rank in RANKS}
    yield started
    for process in started.values():
        process.kill()
        process.wait()


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: process_state(process.pid) == "T", "its stop")


def reported(by: StoppedRanks) -> list[tuple[int, str]]:
    """Return the first reports, within the time in which a stop is noticed."""
    end = time.monotonic() + 2.0
    while not (reports := by.look()) and time.monotonic() < end:
        time.sleep(0.05)
    return reports


@pytest.mark.parametrize(
    ("stopped", "reporter"),
    [((5,), 2), ((2,), 3), ((2, 3), 5)],
    ids=["by the lowest", "the lowest, by the next", "by the only one that runs"],
)
def test_the_lowest_rank_that_runs_reports(
    processes: dict[int, subprocess.Popen[bytes]], stopped: tuple[int, ...], reporter: int
) -> None:
    pids = {rank: process.pid for rank, process in processes.items()}
    ranks = {rank: StoppedRanks(rank, pids) for rank in RANKS}
    assert [one.look() for one in ranks.values()] == [[], [], []]
    for rank in stopped:
        stop(processes[rank])
    assert reported(ranks[reporter]) == [(rank, f"is stopped: kill -CONT {pids[rank]}") for rank in stopped]
    running = {*RANKS} - {*stopped, reporter}
    assert [ranks[rank].look() for rank in running] == [[] for _ in running]


def test_a_lower_rank_that_has_ended_does_not_report(processes: dict[int, subprocess.Popen[bytes]]) -> None:
    pids = {rank: process.pid for rank, process in processes.items()}
    processes[2].kill()
    processes[2].wait()
    stop(processes[5])
    assert reported(StoppedRanks(3, pids)) == [(5, f"is stopped: kill -CONT {pids[5]}")]
