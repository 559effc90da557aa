"""Whether a system kept up: on systems whose capacity is known."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpillm.report.arrivals import arrival_figures
from mpillm.report.request_log import RECORD
from mpillm.report.validity_checks import doubts, queue, rates

Service = Callable[[np.random.Generator, int], NDArray[np.float64]]

SERVICES: dict[str, Service] = {
    "equal": lambda random, n: np.full(n, 0.1),
    "exponential": lambda random, n: random.exponential(0.1, n),
    "batches": lambda random, n: random.choice([0.02, 0.18], n),
}
SERVERS = 16
CAPACITY = SERVERS / 0.1


def behind(
    load: float, n: int, service: Service, seed: int, *, streamed: bool = True, first_s: float | None = None
) -> np.ndarray[Any, Any]:
    """Return the requests of a queue with a known capacity.

    `first_s`: first tokens come so early, as those of a context instance whose generation instance queues.
    """
    random = np.random.default_rng(seed)
    issued = np.cumsum(random.exponential(1 / (load * CAPACITY), n))
    free = [0.0] * SERVERS
    rows = np.zeros(n, RECORD)
    for i, (time, takes) in enumerate(zip(issued.tolist(), service(random, n).tolist(), strict=True)):
        begun = max(time, heapq.heappop(free))
        heapq.heappush(free, begun + takes)
        first = first_s if first_s is not None else begun - time + 0.01
        rows[i] = (time, first if streamed else np.nan, begun - time + takes, 0, 8, 0, -1, -1, 0, 0)
    return rows


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("how", ["streamed", "whole answers", "generation alone"])
def test_an_overloaded_system_is_known(service: str, how: str) -> None:
    """300 offered, 179 answered is a load of 1.68."""
    for seed in range(5):
        for load, n in ((1.68, 500), (1.25, 4000)):
            rows = behind(
                load,
                n,
                SERVICES[service],
                seed,
                streamed=how != "whole answers",
                first_s=0.02 if how == "generation alone" else None,
            )
            found = arrival_figures(rows)
            assert found["queue_grew"], (seed, load)
            assert found["answered_per_second"] == pytest.approx(CAPACITY, rel=0.15)
            assert found["offered_per_second"] == pytest.approx(load * CAPACITY, rel=0.15)


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("load", [0.3, 0.8, 0.95])
def test_a_queue_that_only_wanders_is_not_called_growing(service: str, load: float) -> None:
    for seed in range(20):
        for n in (200, 1500):
            found = arrival_figures(behind(load, n, SERVICES[service], seed))
            assert found["queue_grew"] is False, (seed, n)
    assert found["answered_per_second"] == pytest.approx(found["offered_per_second"], rel=0.05)


def test_a_system_whose_answers_take_a_part_of_the_test_keeps_up() -> None:
    """Without a queue open requests become more at first, but no answer comes later than another."""
    random = np.random.default_rng(1)
    rows = np.zeros(2000, RECORD)
    rows["issued"] = np.cumsum(random.exponential(0.01, 2000))
    rows["ttft"], rows["latency"] = 0.1, random.uniform(5, 15, 2000)
    assert arrival_figures(rows)["queue_grew"] is False


def test_answers_that_come_in_one_moment_have_no_rate_of_their_own() -> None:
    """As of a server that answered 24 requests, a step of all at a time, after six minutes: 495/s."""
    rows = np.zeros(24, RECORD)
    rows["issued"] = np.linspace(0, 80, 24)
    rows["latency"] = 366 + np.linspace(0, 0.046, 24) - rows["issued"]
    assert arrival_figures(rows)["answered_per_second"] == pytest.approx(23 / 80, rel=0.01)


@pytest.mark.parametrize("order", ["latest first", "at random"])
def test_an_overloaded_system_that_serves_in_another_order(order: str) -> None:
    """No latency grows by time of issue: those that wait are overtaken."""
    for seed in range(5):
        for load, n in ((2.0, 500), (1.25, 4000)):
            assert arrival_figures(overtaken(load, n, seed, order))["queue_grew"], (seed, load)
    for seed in range(20):
        assert arrival_figures(overtaken(0.9, 1500, seed, order))["queue_grew"] is False, seed


def overtaken(load: float, n: int, seed: int, order: str) -> np.ndarray[Any, Any]:
    """Return the requests of a single server whose queue is no line."""
    random = np.random.default_rng(seed)
    rows = np.zeros(n, RECORD)
    rows["issued"] = np.cumsum(random.exponential(1 / (load * CAPACITY), n))
    waiting: list[int] = []
    time, come = 0.0, 0
    for _ in range(n):
        if not waiting:
            time = max(time, rows["issued"][come])
        while come < n and rows["issued"][come] <= time:
            waiting.append(come)
            come += 1
        at = waiting.pop(-1 if order == "latest first" else int(random.integers(len(waiting))))
        time += 1 / CAPACITY
        rows["ttft"][at] = rows["latency"][at] = time - rows["issued"][at]
    return rows


def test_a_system_that_answers_nobody_before_the_last_request_has_not_kept_up() -> None:
    """It stood still for 30 s, then was faster than requests had come: later ones waited less."""
    random = np.random.default_rng(1)
    rows = np.zeros(1200, RECORD)
    rows["issued"] = np.cumsum(random.exponential(1 / 60, 1200))
    rows["ttft"] = 30 + np.arange(1200) / 70 - rows["issued"]
    rows["latency"] = rows["ttft"] + 1
    found = arrival_figures(rows)
    assert found["queue_grew"] is None and queue(found).startswith("too short to show")


def test_too_few_requests_tell_nothing() -> None:
    found = arrival_figures(behind(3.0, 60, SERVICES["equal"], 0))
    assert found["queue_grew"] is None and queue(found).startswith("too short to show whether")
    one = arrival_figures(np.zeros(1, RECORD))
    assert one == {"offered_per_second": None, "answered_per_second": None, "queue_grew": None}
    assert rates(one) == "" and not doubts(one)


def test_errors_are_no_quick_answers() -> None:
    rows = behind(1.68, 1000, SERVICES["equal"], 0)
    rows["error"][800:], rows["latency"][800:], rows["ttft"][800:] = 1, 0.001, np.nan
    assert arrival_figures(rows)["queue_grew"]


def test_the_doubt_names_both_rates() -> None:
    result = {"offered_per_second": 300.0, "answered_per_second": 179.0, "queue_grew": True}
    assert doubts(result) == [
        "the queue grew: 300 queries/s offered, 179 answered, the time of one answer aside;"
        " answers came later and later"
    ]
