"""What the console prints while a test runs."""

from __future__ import annotations

import io
import itertools
import re
from pathlib import Path

import pytest

from launch.environment import TTY
from mpillm.errors import Failure
from mpillm.report.console import Console, LoadProgress, progress_lines
from mpillm.report.timeline import TotalMetrics


@pytest.mark.parametrize("steady", [False, True])
def test_steady_state_progress(steady: bool) -> None:
    """The last 30 seconds count: 60 seconds in which nothing came do not lower the rate of 10 samples a
    second."""
    out, seconds = io.StringIO(), range(6, 121, 6)
    bar = Console(out, clock=iter([0.0, *map(float, seconds)]).__next__)
    for second in seconds:
        done = 10 * max(0, second - 60)
        bar.progress(LoadProgress(done, 1000, 20 * done, float(second)), steady=steady)
    lines = out.getvalue().splitlines()
    assert re.search(r"600/1,000 samples  5\.0/s  120 s, 80 s left$", lines[-2 if steady else -1])
    assert (lines[-1] == "    last 30 s: 10.0 samples/s  200.0 tokens/s") == steady


BUSY = TotalMetrics(12_900.4, 13_420.0, 45_178.0, 0.4, 64, 96, 0.431)


def test_progress_of_instances_is_printed_before_the_first_answer() -> None:
    assert progress_lines(LoadProgress(0, 160, 0, 106.2), BUSY) == [
        "  test    [........................] 0/160 samples  0.0/s  106 s",
        "    out 12.9k tok/s (now 13.4k)  in 45.2k (0.4)  run 64  wait 96  kv 43%",
    ]


def test_a_server_test_counts_planned_queries_and_time() -> None:
    """Not answered over issued, which is nearly all at any time. Overloaded, it takes longer than planned."""
    keeps_up = LoadProgress(5_000, 5_020, 0, 50.0, 10_034, 100.0)
    assert progress_lines(keeps_up, None) == [
        "  test    [###########............] 5,000/10,034 samples  100/s  50 s, 50 s left"
    ]
    assert LoadProgress(10, 12, 0, 0.5, 10_034, 100.0).left_s() == 99.5  # too few answers for a rate
    overloaded = LoadProgress(2_000, 5_020, 0, 50.0, 10_000, 100.0)
    assert overloaded.left_s() == 200.0
    assert LoadProgress(2, 3, 0, 60.0, 300, 50.0).left_s() is None, "behind its schedule: it said 0 s"
    over = LoadProgress(10_000, 10_100, 0, 101.0, 10_034, 100.0)
    assert over.total == 10_100 and over.left_s() == pytest.approx(1.01)


def test_a_test_of_a_given_time_counts_that() -> None:
    """SingleStream asks for as long as it lasts."""
    assert LoadProgress(30, 31, 0, 15.0, None, 60.0).share() == 0.25
    assert LoadProgress(30, 31, 0, 15.0, None, 60.0).left_s() == 45.0
    assert LoadProgress(30, 31, 0, 60.0, None, 60.0).left_s() == 2.0


def test_what_waits_for_room_in_an_instance_waits() -> None:
    """It said 128, the instances' own queues, while 13,000 waited."""
    computed = BUSY._replace(running=256, waiting=128)
    assert "  run 256  wait 12.7k  kv" in progress_lines(LoadProgress(44, 13_000, 0, 10.0), computed)[1]


def test_a_core_that_can_not_say_what_it_computes() -> None:
    assert progress_lines(LoadProgress(40, 160, 0, 10.0), None) == [
        "  test    [######..................] 40/160 samples  4.0/s  10 s, 30 s left"
    ]
    assert progress_lines(LoadProgress(0, 160, 0, 10.0), BUSY._replace(kv_cache_usage=None))[1].endswith(
        "  wait 96"
    )


@pytest.mark.parametrize("n", [0, 1, 24_576, 5_000_000])
def test_progress_fits_80_columns(n: int) -> None:
    rate = 88_888_888.0 / max(1, n)
    computed = TotalMetrics(rate, rate, 999.5, 999.5, 65_536, 131_072, 1.0)
    for elapsed in (0.5, 3_600.0, 86_400.0):
        lines = progress_lines(LoadProgress(n, max(1, n), n, elapsed, 2 * n, 90_000.0), computed)
        assert len(lines) == 2 and max(map(len, lines)) <= 80


def test_a_long_phase_prints_the_activity_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log gets it at growing intervals, which restart in each phase. Ranks with the same text share it."""
    out = io.StringIO()
    console = Console(out)
    awaited = {"waiting for http://a:1: connection refused": [2, 3, 4], "": [1], "reading": [5], "x": [6]}
    for half_s in range(1, 60):
        console.waiting("load", half_s / 2, awaited)
    console.waiting("warmup", 2.0, {"": [1]})
    console.waiting("warmup", 3.0, {"": [1]})
    console.waiting("warmup", 30.0, {})
    for seconds in (2.0, 3.0):
        console.waiting("drain", seconds, {"": [2, 3, 4]}, {1: "h1", 2: "h1", 3: "h2", 4: "h2"})
    activity = "ranks 2-4: waiting for http://a:1: connection refused; rank 1: not done; and 2 more"
    assert out.getvalue().splitlines() == [
        f"  load    after 3 s  {activity}",
        f"  load    after 9 s  {activity}",
        f"  load    after 27 s  {activity}",
        "  warmup  after 3 s  rank 1: not done",
        "  drain   after 3 s  rank 2 on h1 and host h2 (ranks 3-4): not done",
    ]
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv(TTY, "1")
    out = io.StringIO()
    console = Console(out)
    for half_s in range(2, 9):
        console.waiting("load", half_s / 2, {"waiting for b\nuntil then": [1, 2], "for c\nuntil then": [3]})
    assert out.getvalue().count("until then") == 1, "further lines of a text are printed once"
    assert out.getvalue().count("ranks 1-2: waiting for b; rank 3: for c") == 7
    out = io.StringIO()
    console = Console(out)
    for half_s in range(1, 9):
        console.waiting("load", half_s / 2, {"": [1]})
    assert out.getvalue().count("rank 1") == 7


def test_no_bar_before_the_first_query() -> None:
    out = io.StringIO()
    bar = Console(out, clock=itertools.count(step=60).__next__)
    bar.progress(LoadProgress(0, 0, 0, 0.01))
    assert not out.getvalue()
    bar.progress(LoadProgress(0, 64, 0, 0.01))
    assert "0/64 samples" in out.getvalue()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux")
def test_a_console_that_takes_no_more(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as out:
        console = Console(out)
        console.line("the run goes on")
        console.summary([("status", "VALID")])


@pytest.mark.parametrize(
    "rank, expected", [(None, "mpillm: interrupted (Ctrl-C) in phase 'test'\n  see runs/x\n"), (2, None)]
)
def test_an_interrupt_is_no_failure(rank: int | None, expected: str | None) -> None:
    """An interrupt of the run is none; a signal to one rank is."""
    err = io.StringIO()
    failure = Failure("interrupted (Ctrl-C)", rank, code=130, interrupted=True)
    Console(io.StringIO(), err).failure(
        "in phase 'test'", [failure], ["see runs/x"], lambda rank: f"rank {rank}"
    )
    assert err.getvalue() == (
        expected or "mpillm: failed in phase 'test'\n  rank 2: interrupted (Ctrl-C)\n  see runs/x\n"
    )


def test_a_lost_host_is_named() -> None:
    err = io.StringIO()
    lost = [Failure("no heartbeat for 30 s", rank, code=5) for rank in (4, 5)]
    hosts = {rank: f"h{rank // 2 + 1}" for rank in range(6)}
    Console(io.StringIO(), err).failure("in phase 'test'", lost, [], lambda rank: f"rank {rank}", hosts)
    assert err.getvalue() == "mpillm: failed in phase 'test'\n  host h3 (ranks 4-5): no heartbeat for 30 s\n"


def test_a_failure_of_no_rank_names_none() -> None:
    err = io.StringIO()
    Console(io.StringIO(), err).failure("before", [Failure("--x: wrong")], [], str, {0: "a", 1: "b"})
    assert err.getvalue() == "mpillm: failed before\n  --x: wrong\n"


def test_answers_fit_80_columns() -> None:
    """Under mpirun the console is a pipe, whatever the terminal's width is."""
    out = io.StringIO()
    Console(out).answers([(1234, "of words " * 40, "the answer " * 60), (5, "x", "")])
    lines = out.getvalue().splitlines()
    assert len(lines) == 2 * 2 + 4 + 1 and 76 < max(map(len, lines)) <= 80
