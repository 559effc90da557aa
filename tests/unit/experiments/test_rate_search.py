"""The search for the highest rate, on systems whose answer is known."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from disagg.errors import ConfigError
from mpillm.errors import StageError
from mpillm.experiments.rate_search import RateTrial, SearchRecord, find_max_rate, forecast
from mpillm.experiments.rate_tests import RateTests, hopeless
from mpillm.loadgen.forecast import arrivals
from mpillm.options.options import parse_run
from mpillm.report.arrivals import queue_slope
from mpillm.report.request_log import RECORD, RequestLog
from mpillm.runtime.whole_runs import EndedRun
from mpillm.workloads.early_stopping import max_late, queries_needed

SEED = 16159082839903944936  # of round v6.1


class Queue:
    """`servers` that take `service_s` each, behind LoadGen's own arrivals."""

    def __init__(self, servers: int, service_s: float, limit_s: float) -> None:
        self.servers, self.service_s, self.limit_s = servers, service_s, limit_s
        self.tests = 0

    def records(self, rate: float, seconds: float) -> np.ndarray:
        settings = SimpleNamespace(server_target_qps=rate, schedule_rng_seed=SEED)
        times = arrivals(settings, seconds, 662)
        times = times[: max(662, int(np.searchsorted(times, seconds)) + 1)]
        free = [0.0] * self.servers
        rows = np.zeros(len(times), RECORD)
        for i, issued in enumerate(times.tolist()):
            ended = max(issued, heapq.heappop(free)) + self.service_s
            heapq.heappush(free, ended)
            rows[i] = (issued, ended - issued, ended - issued, 0, 1, 0, -1, -1, 0, 0)
        return rows

    def test(self, rate: float, full: bool) -> RateTrial:
        self.tests += 1
        rows = self.records(rate, 120 if full else 12)
        late = int((rows["ttft"] > self.limit_s).sum())
        ended = float((rows["issued"] + rows["latency"]).max())
        return RateTrial(rate, full, late <= max_late(len(rows), 0.99), f"{late} late", len(rows) / ended)


@pytest.mark.parametrize(
    ("servers", "service_s", "limit_s"), [(16, 0.2, 1.0), (4, 0.02, 0.5), (64, 0.5, 0.9)]
)
@pytest.mark.parametrize("start", [0.3, 1.0, 3.0])
def test_the_rate_found_is_the_highest(servers: int, service_s: float, limit_s: float, start: float) -> None:
    queue = Queue(servers, service_s, limit_s)
    capacity = servers / service_s
    found = find_max_rate(queue.test, start * capacity, 0.02)
    assert found.best.full and queue.test(found.best.rate, True).valid
    assert not queue.test(found.too_high, True).valid
    assert 1 < found.too_high / found.best.rate < 1.021
    assert 0.85 < found.best.rate / capacity < 1.03
    assert queue.tests < 30


@pytest.mark.parametrize("limit", [11.0, 16.0, 97.0, 100.5])
def test_the_forecast_of_remaining_tests(limit: float) -> None:
    """For a system with a sharp limit, all forecasts come true; without a bracket there is no forecast."""
    tried: list[RateTrial] = []
    forecasts = []

    def test(rate: float, full: bool) -> RateTrial:
        tried.append(RateTrial(rate, full, valid=rate <= limit, completed=min(rate, limit)))
        forecasts.append(forecast(tried, 0.01))
        return tried[-1]

    find_max_rate(test, 10.0, 0.01)
    assert forecasts[0] is None and forecasts[-1] == (0, 0)
    for i, left in enumerate(forecasts):
        is_left = [sum(one.full is full for one in tried[i + 1 :]) for full in (False, True)]
        if left is not None:
            assert left[0] == is_left[0] and abs(left[1] - is_left[1]) <= 1, (i, left, is_left)


def test_a_system_that_is_always_late_is_an_error() -> None:
    with pytest.raises(StageError, match=r"no rate is VALID, not even .* per second: 662 late"):
        find_max_rate(Queue(4, 0.5, 0.1).test, 8.0, 0.02)


def test_a_system_without_a_limit() -> None:
    with pytest.raises(StageError, match="no limit was found"):
        find_max_rate(lambda rate, full: RateTrial(rate, full, True), 8.0, 0.02)


def test_a_run_that_fails_ends_the_search() -> None:
    calls = []

    def test(rate: float, full: bool) -> RateTrial:
        calls.append(rate)
        if len(calls) == 3:
            raise StageError("a rank was lost")
        return RateTrial(rate, full, False, completed=1.0)

    with pytest.raises(StageError, match="a rank was lost"):
        find_max_rate(test, 8.0, 0.02)
    assert len(calls) == 3


def test_a_search_with_short_tests_of_another_length_is_another_search(tmp_path: Path) -> None:
    """It took the earlier short tests for its own, without a word."""

    def search(probe_s: float | None) -> SearchRecord:
        tests = RateTests(tmp_path, ["-n", "2"], [], parse_run(["--scenarios=Server"]), probe_s)
        return SearchRecord(tmp_path, tests.settings)

    first = search(8.0)
    first.begin(5.0)
    first.add(RateTrial(5.0, False, True))
    assert search(8.0).known(5.0, False) == first.tests[0]
    with pytest.raises(ConfigError, match=r"a search with other options began there \(search\.json lists"):
        search(20.0)


def test_most_late_is_the_inverse_of_queries_needed() -> None:
    for late in range(25):
        needed = queries_needed(0.99, late)
        assert needed is not None and (max_late(needed, 0.99), max_late(needed - 1, 0.99)) == (
            late,
            late - 1,
        )
    assert 49_000 < max_late(5_000_000, 0.99) < 50_000  # no overflow


def test_too_many_late_ones_are_hopeless_and_one_fewer_are_not() -> None:
    rows = np.zeros(100, RECORD)
    rows["issued"], rows["ttft"] = np.arange(100) / 10, 0.1
    allowed = max_late(1000, 0.99)
    rows["ttft"][:allowed] = 2.0
    assert hopeless(rows, {"ttft": 1000}, 1000, 10.0) == ""
    rows["ttft"][: allowed + 1] = 2.0
    assert f"{allowed + 1} of 1,000 first tokens were later than 1000 ms already" in hopeless(
        rows, {"ttft": 1000}, 1000, 10.0
    )


def test_a_queue_that_grows_is_hopeless_before_it_is_late() -> None:
    queue = Queue(16, 0.2, 10.0)
    rows = queue.records(120.0, 20)  # half as much again as the capacity of 80
    why = hopeless(rows[rows["issued"] < 10], {"ttft": 10_000}, 120 * 60, 120.0)
    assert "the queue grows" in why


def test_a_queue_that_only_wanders_is_not_hopeless() -> None:
    """At 97 % of the capacity queues grow for a while, by chance."""
    queue = Queue(16, 0.2, 10.0)
    for seconds in (5, 10, 20, 40, 80):
        rows = queue.records(0.97 * 80, seconds)
        assert hopeless(rows, {"ttft": 10_000}, 80 * 600, 0.97 * 80) == ""
    assert queue_slope(rows[:50]) is None


def test_a_server_that_answers_in_bursts_has_no_huge_capacity(tmp_path: Path) -> None:
    """64 answers come together every 0.4 s: 160 per second, not the 40,000 of one burst."""
    bursts = 0

    def run(folder: Path, mpirun: list[str], options: list[str], watch: Callable[[], str]) -> EndedRun:
        nonlocal bursts
        folder.mkdir()
        log, began = RequestLog(folder), time.monotonic()
        while not (stopped := watch()):
            time.sleep(0.01)
            if time.monotonic() - began > 0.4 * (bursts + 1):
                bursts += 1
                for i in range(64):
                    log.add_one(0.0, 0.0, 0.4 * bursts + i * 25e-6, 0, 1, False)
                log.flush()
            assert bursts < 30, "it is not stopped"
        log.close()
        return EndedRun(folder, 0, {}, stopped)

    tests = RateTests(tmp_path, ["-n", "2"], [], parse_run(["--scenarios=Server"]), probe_s=0.1, run_in=run)
    assert 100 < tests.capacity() < 300 and bursts < 10
