"""The window of a test in which the time per output token has a plateau."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from mpillm.submission.fixed_concurrency import FixedConcurrency, FullPasses, SteadyStateGoal
from mpillm.submission.steady_state import (
    SteadyState,
    SuperPass,
    SuperPasses,
    change_point,
    find_steady_state,
    mann_kendall,
)

SIZE = 40  # requests in a super-pass


def passes_of(
    levels: Sequence[float], seconds: float = 200.0, noise: float = 0.02, ttft: Sequence[float] = ()
) -> list[SuperPass]:
    """Super-passes of this length, with these times per output token (in ms) and a little noise."""
    random = np.random.default_rng(5)
    passes = SuperPasses(SIZE)
    for i, level in enumerate(levels):
        for k in range(SIZE):
            tpot = level * 1e-3 * (1 + noise * random.standard_normal())
            first = ttft[i] if ttft else 0.1
            passes.of(i * SIZE + k).add(seconds * (i + k / SIZE), first, tpot, 100)
    return passes.complete()


def search(levels: Sequence[float], min_s: float = 600.0, **more: Any) -> SteadyState:
    return find_steady_state(passes_of(levels, **more), SIZE, min_s)


def test_a_plateau_that_lasts_is_the_result() -> None:
    state = search([10.0] * 8)
    block = state.block()
    assert state.is_official and block["status"] == "windowable" and block["verdict"] == "STEADY STATE"
    window = block["window"]
    assert (window["super_pass_start"], window["super_pass_end"]) == (1, 7), "the first pass is the ramp"
    assert window["n_samples"] == 7 * SIZE and window["super_pass_size"] == SIZE
    assert window["duration_s"] == 200 * (7 - 1 / SIZE), "from the first issued request to the last"
    assert block["state"] == {"tpot_p50": "Plateau", "tpot_p90": "Plateau"} and "anomaly" not in block
    figures = state.figures()
    assert figures["system_tps"] == pytest.approx(7 * SIZE * 100 / 1395)
    assert figures["tps_per_user"] == pytest.approx(97.5, rel=0.01), "1000 ms / 10 ms, at p90"
    assert figures["ttft_p90_ms"] == 100


def test_the_ramp_does_not_belong_to_the_window() -> None:
    state = search([4.0, 6.0, 8.0, *[10.0] * 7])
    assert state.is_official and state.start == 3 and len(state.passes) == 7


@pytest.mark.parametrize(
    ("levels", "seconds", "status", "verdict"),
    [
        ([], 200, "partial_dataset", "not found"),
        ([10.0], 9000, "insufficient_passes", "not found"),
        ([10.0] * 4, 9000, "insufficient_passes", "not found"),
        ([10.0] * 5, 100, "insufficient_duration", "STEADY STATE"),
        ([10.0] * 5, 200, "windowable", "STEADY STATE"),
        ([10 * 1.1**i for i in range(12)], 200, "insufficient_passes", "drifting_up"),
        ([10 / 1.1**i for i in range(12)], 200, "insufficient_passes", "drifting_down"),
        ([10.0, 14.0] * 6, 200, "insufficient_passes", "not found"),
    ],
)
def test_what_is_no_steady_state(levels: list[float], seconds: float, status: str, verdict: str) -> None:
    state = search(levels, seconds=seconds)
    assert (state.status, state.verdict) == (status, verdict)
    block = state.block()
    # MLCommons' checker: a range of four passes contradicts `insufficient_passes`.
    assert ("super_pass_end" in block["window"]) == (status in ("windowable", "insufficient_duration"))
    assert not state.figures() or state.passes


def test_of_two_plateaus_the_first_counts() -> None:
    state = search([10.0] * 9 + [13.0] * 9)
    assert state.is_official and state.verdict == "anomaly" and (state.start, len(state.passes)) == (1, 8)
    shift = state.block()["anomaly"]
    assert shift["super_pass"] == 9 and shift["tpot_change_percent"] == pytest.approx(30, abs=1)
    # So does a first one that is shorter than half of the test.
    state = search([10.0] * 6 + [13.0] * 20)
    assert state.is_official and (state.start, len(state.passes)) == (1, 5) and state.verdict == "anomaly"
    # If the first one is too short, the later one counts.
    state = search([10.0] * 6 + [13.0] * 20, min_s=2000)
    assert state.is_official and state.start == 6 and state.verdict == "STEADY STATE"


def test_a_drift_after_the_window_is_disclosed() -> None:
    """The level climbs after the window, and reaches no other one."""
    state = search([10.0] * 12 + [10 * 1.06**i for i in range(1, 9)])
    assert state.is_official and state.verdict == "drifting_up" and state.start + len(state.passes) <= 14
    assert set(state.state.values()) == {"Plateau"}


def test_first_tokens_do_not_decide() -> None:
    state = search([10.0] * 10, ttft=[0.1 * 1.2**i for i in range(10)])
    assert state.is_official and state.verdict == "STEADY STATE"
    assert state.block()["ttft_state"] == {"ttft_p50": "Drifting Up", "ttft_p90": "Drifting Up"}
    assert set(state.block()["state"]) == {"tpot_p50", "tpot_p90"}


def test_many_short_passes_are_grouped() -> None:
    """A small data set: the effective size is in the block."""
    state = search([10.0] * 1000, seconds=1)
    assert state.is_official and state.block()["window"]["super_pass_size"] == 4 * SIZE
    assert len(state.passes) <= 250


def test_answers_of_one_token_have_no_plateau() -> None:
    passes = SuperPasses(2)
    for i in range(20):
        passes.of(i).add(100.0 * i, 0.1, 0.0, 1)
    state = find_steady_state(passes.complete(), 2, 600)
    assert (state.status, state.verdict) == ("insufficient_passes", "not found")


def test_outstanding_and_failed_requests() -> None:
    """A pass counts when all its requests have ended; those after it wait for it."""
    passes = SuperPasses(2)
    for i in (0, 2, 3, 4, 5):
        passes.of(i).add(float(i), 0.1, 0.01, 8)
    assert passes.complete() == []
    passes.of(1).add_failure(1.0)
    first, *rest = passes.complete()
    assert len(rest) == 2 and (first.ended, first.completed) == (2, 1) and (first.first, first.last) == (0, 1)


def test_trends() -> None:
    rising = np.arange(10.0)
    assert [mann_kendall(values) for values in (rising, -rising, np.ones(10))] == [1, -1, 0]
    assert mann_kendall(rising[:4]) == 0, "too few values for significance"
    random = np.random.default_rng(1)
    assert sum(map(abs, (mann_kendall(random.standard_normal(20)) for _ in range(400)))) < 40
    # In a random walk, neighbours resemble each other, which looks like a trend without the correction.
    walks = [np.cumsum(random.standard_normal(40)) for _ in range(100)]
    plain = sum(abs(np.corrcoef(np.arange(40), walk)[0, 1]) > 0.4 for walk in walks)
    assert sum(abs(mann_kendall(walk)) for walk in walks) < plain


def test_change_points() -> None:
    step = np.array([1.0] * 8 + [2.0] * 8)
    assert change_point(step) == 8 and change_point(np.ones(16)) is None
    assert change_point(np.array([1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0])) is None


class Server:
    """A client whose server answers after a millisecond, with `tpot(i)` for request i."""

    def __init__(self, tpot: Any) -> None:
        self.calls: dict[int, Any] = {}
        self.open_at_submission: list[int] = []
        self.listener: Any = None
        self._tpot = tpot

    def submit(self, index: int, prompt: list[int], sampling: object) -> None:
        now = time.perf_counter()
        self.open_at_submission.append(len(self.calls))
        times = [now + 0.001, now + 0.001 + self._tpot(index)]
        answer = SimpleNamespace(times=times, completion_tokens=2, size=2, text="", prompt_tokens=None)
        call = self.calls[index] = SimpleNamespace(id=index, sent_at=now, answer=answer)
        asyncio.get_running_loop().call_later(0.001, self._end, call)

    def _end(self, call: Any) -> None:
        self.listener.on_done(call)
        del self.calls[call.id]


def test_a_pass_of_offline_begins_after_the_end_of_another() -> None:
    """The server may reorder the requests of one pass, but not those of two (rules, 5.7.1)."""
    prompts = [np.zeros(3, np.int32)] * 8
    order = itertools.cycle(range(8))
    test = FixedConcurrency(prompts, order, cast(Any, None), 8, 24, drained_after=8)
    server = Server(lambda i: 0.001 * (i % 8))
    asyncio.run(test.run(cast(Any, server)))
    assert server.open_at_submission == [*range(8)] * 3
    goal = FullPasses(8, 10.0)
    assert [goal.is_reached(*at) for at in ((0, 11), (8, 9), (15, 11), (16, 11))] == [False] * 3 + [True]


def run(goal: SteadyStateGoal, tpot: Any) -> FixedConcurrency:
    prompts = [np.zeros(3, np.int32)] * goal.passes.size
    test = FixedConcurrency(prompts, itertools.cycle(range(goal.passes.size)), cast(Any, None), 4, goal=goal)
    asyncio.run(test.run(cast(Any, Server(tpot))))
    return test


def test_a_test_ends_with_the_pass_after_its_steady_state() -> None:
    goal = SteadyStateGoal(8, 0.02, 30.0)
    test = run(goal, lambda _: 0.01)
    assert len(test.records) % 8 == 0 and len(test.records) >= 5 * 8
    assert find_steady_state(goal.passes.complete(), 8, 0.02).is_official
    assert len(goal.passes.complete()) * 8 == len(test.records), "outstanding requests end in their pass"


def test_a_test_without_a_steady_state_ends_at_its_longest() -> None:
    goal = SteadyStateGoal(8, 0.02, 0.2)
    began = time.perf_counter()
    test = run(goal, lambda i: 0.01 * 1.02**i)
    assert time.perf_counter() - began >= 0.2 and len(test.records) % 8 == 0
    assert not find_steady_state(goal.passes.complete(), 8, 0.02).is_official
