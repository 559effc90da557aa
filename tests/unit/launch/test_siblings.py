"""The ranks of this job on this host, also those that can't speak."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launch.prctl import KEEPER
from launch.siblings import (
    EndedRanks,
    RankProcess,
    StoppedProcesses,
    _missing,
    describe_rank,
    how_it_is_stopped,
    process_state,
    ranks_here,
    runs,
    siblings,
    stopped_ranks,
)
from tests.helpers.support import wait_until


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, subprocess.Popen[bytes]]]:
    """Yield the processes of three ranks."""
    job = {"PMIX_NAMESPACE": f"test-{os.getpid()}", "OMPI_COMM_WORLD_SIZE": "3"}
    for name, value in (job | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}).items():
        monkeypatch.setenv(name, value)
    made = {
        rank: subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"],
            env={**os.environ, "OMPI_COMM_WORLD_RANK": str(rank)},
        )
        for rank in (0, 1, 2)
    }
    yield made
    for process in made.values():
        process.kill()
        process.wait()


def test_a_stopped_rank_is_named(ranks: dict[int, subprocess.Popen[bytes]]) -> None:
    ranks[2].send_signal(signal.SIGSTOP)
    wait_until(lambda: "rank 2" in stopped_ranks(), "a stopped rank")
    assert stopped_ranks() == f"rank 2 (pid {ranks[2].pid} is stopped: kill -CONT {ranks[2].pid})"
    assert {rank: siblings()[rank].pid for rank in ranks} == {r: p.pid for r, p in ranks.items()}
    assert describe_rank(1) == f" (pid {ranks[1].pid} runs)"
    assert (describe_rank(9), ranks_here()) == ("", 3)


def test_a_process_that_keeps_a_ranks_place_is_none(ranks: dict[int, subprocess.Popen[bytes]]) -> None:
    program = f"from launch.prctl import *; name_process({KEEPER!r}); import time; time.sleep(60)"
    keeper = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, "OMPI_COMM_WORLD_RANK": "3"}
    )
    comm = Path(f"/proc/{keeper.pid}/comm")
    try:
        wait_until(lambda: comm.read_text().strip() == KEEPER, "its name")
        assert siblings().keys() == {0, 1, 2}
    finally:
        keeper.kill()
        keeper.wait()


def test_a_rank_that_ends_is_named(ranks: dict[int, subprocess.Popen[bytes]]) -> None:
    ended = EndedRanks()
    wait_until(lambda: not ended.look() and siblings().keys() == {0, 1, 2}, "all ranks")
    assert ended.look() == ""
    ranks[2].kill()
    wait_until(ended.look, "a rank that ends")
    assert ended.look() == f"rank 2 on {os.uname().nodename} (pid {ranks[2].pid}) has ended"


def test_of_several_the_one_that_ended_first_is_named(ranks: dict[int, subprocess.Popen[bytes]]) -> None:
    """The others may have ended because of it. The process that looks is woken at once, before these."""
    ended = EndedRanks()
    wait_until(lambda: not ended.look() and len(ended._watched) == 3, "all ranks")
    ranks[2].kill()
    assert select.select([ended.exits], [], [], 10)[0]

    def and_the_others(looked: Callable[[], dict[int, RankProcess]] = siblings) -> dict[int, RankProcess]:
        for process in ranks.values():
            process.kill()
            process.wait()
        return looked()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("launch.siblings.siblings", and_the_others)
        assert ended.look() == f"rank 2 on {os.uname().nodename} (pid {ranks[2].pid}) has ended"


def test_a_rank_that_was_never_there_is_named_later(ranks: dict[int, subprocess.Popen[bytes]]) -> None:
    ranks[1].kill()
    ranks[1].wait()
    wait_until(lambda: siblings().keys() == {0, 2}, "the other ranks")
    assert EndedRanks().look() == ""
    assert EndedRanks(all_started_s=-1.0).look() == "rank 1 has ended, or was not started"


def test_a_child_that_was_taken_for_its_rank_and_ends_is_no_loss(
    ranks: dict[int, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    ended = EndedRanks()
    with monkeypatch.context() as patched:
        patched.setattr("launch.siblings.siblings", lambda: {2: RankProcess(child.pid, "S")})
        assert ended.look() == ""
    wait_until(lambda: siblings().keys() == {0, 1, 2}, "all ranks")
    assert ended.look() == ""


def test_ranks_that_see_no_other_say_nothing_of_them(ranks: dict[int, subprocess.Popen[bytes]]) -> None:
    for rank in (1, 2):
        ranks[rank].kill()
        ranks[rank].wait()
    wait_until(lambda: siblings().keys() == {0}, "the rank that is left")
    assert EndedRanks(all_started_s=-1.0).look() == ""


def test_without_a_launcher_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("OMPI_", "PMI", "PMIX_", "SLURM_")):
            monkeypatch.delenv(name)
    assert (siblings(), stopped_ranks(), describe_rank(0), ranks_here()) == ({}, "", "", None)


def test_without_a_file_descriptor_no_rank_counts_as_ended() -> None:
    """Strangers may hold them all."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        stack.callback(child.wait)
        stack.callback(child.kill)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        with contextlib.suppress(OSError):
            while True:
                stack.callback(os.close, os.dup(0))
        assert runs(child.pid)
    assert not runs(child.pid)


@pytest.mark.parametrize(
    ("alone", "places", "missing"),
    [
        (True, {0: None, 2: None}, [1]),
        (False, {4: 0, 6: 2}, [5]),  # of three, beside other hosts
        (False, {4: 0}, [5, 6]),
        (False, {0: 0, 4: 2}, None),  # not in a row
        (False, {4: None, 6: None}, None),
    ],
)
def test_which_of_a_hosts_ranks_is_missing(
    alone: bool, places: dict[int, int | None], missing: list[int] | None
) -> None:
    assert _missing(3, alone, places) == missing


def test_a_process_is_returned_once_each_time_it_is_stopped() -> None:
    stopped = StoppedProcesses(min_stop_s=0.0)
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            for _ in range(2):
                assert stopped.look([process.pid, 0]) == [] and how_it_is_stopped(process.pid) == ""
                process.send_signal(signal.SIGSTOP)
                wait_until(lambda: process_state(process.pid) == "T", "its stop")
                how = f"is stopped: kill -CONT {process.pid}"
                assert stopped.look([process.pid]) == [(process.pid, how)]
                assert stopped.look([process.pid]) == [] and how_it_is_stopped(process.pid) == how
                process.send_signal(signal.SIGCONT)
                wait_until(lambda: process_state(process.pid) != "T", "its going on")
        finally:
            process.kill()
    assert stopped.look([process.pid]) == [] and how_it_is_stopped(process.pid) == ""


def test_a_short_stop_is_not_reported() -> None:
    """A tool that takes a snapshot stops a process for a moment."""
    stopped = StoppedProcesses()
    with subprocess.Popen(["sleep", "60"]) as process:
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: process_state(process.pid) == "T", "its stop")
        assert stopped.look([process.pid]) == []
        wait_until(lambda: stopped.look([process.pid]), "the report")
        process.kill()
