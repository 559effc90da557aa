"""The simulation of `advise` against closed forms: queues, batches, caches, handoffs, shared cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from mpillm.engine.shape.engine_config import SchedulerConfig
from mpillm.errors import StageError
from mpillm.experiments.advise.simulated_instances import (
    SimulatedRequest,
    StepInstance,
)
from mpillm.experiments.advise.simulated_slots import SlotInstance, SlotTimes
from mpillm.experiments.advise.simulator import Make, Simulation, System, latencies
from mpillm.experiments.advise.step_times import CoreSharing, LinearTime, StepTimes

SCHEDULER = SchedulerConfig(max_batch_size=8, max_num_tokens=1024, tokens_per_block=32)
CONTEXT_S, STEP_S = 0.5, 0.01
BY_STEP = StepTimes((0, 1), (STEP_S, STEP_S), (0.0, 0.0, 0.0, 0.0))
TIMES = replace(BY_STEP, slopes=(CONTEXT_S - STEP_S, 0.0, 0.0, 0.0))  # a context alone takes CONTEXT_S


def system(entries: int = 1, generations: int = 0, **changes: object) -> System:
    made = System(entries, generations, 16, 1 << 20, 1 << 20, "load_balancing")
    return replace(made, **changes)  # type: ignore[arg-type]


def engines(
    times: StepTimes,
    config: SchedulerConfig = SCHEDULER,
    stages: int = 1,
    *,
    kv_cache_tokens: int = 1 << 16,
    split: bool = False,
) -> Make:
    return lambda generates, listener, at: StepInstance(
        config, kv_cache_tokens, times, stages, stages, split and not generates, listener
    )


def slots(n: int, first_s: float, per_token_s: float, *, split: bool = False) -> Make:
    times = SlotTimes(LinearTime(first_s), per_token_s)
    return lambda generates, listener, at: SlotInstance(n, times, 1, split and not generates, listener, at)


def run(system: System, make: Make, requests: Sequence[SimulatedRequest]) -> float:
    """Return when the last answer was there."""
    Simulation(system, make).run(requests)
    assert all(0 <= request.first <= request.ended for request in requests)
    return max(request.ended for request in requests)


def same(n: int, n_prompt: int = 32, n_output: int = 4) -> list[SimulatedRequest]:
    return [SimulatedRequest(n_prompt, n_output, n_output) for _ in range(n)]


def test_one_server_waits_as_m_d_1() -> None:
    """Each request begins when the one before it has ended; the mean wait is Pollaczek's and Khinchine's."""
    service_s, load = 0.1, 0.7
    gaps = np.random.default_rng(0).exponential(service_s / load, 6000)
    at = np.cumsum(gaps)
    requests = [SimulatedRequest(8, 1, 1, float(t)) for t in at]
    run(system(), slots(1, service_s, 0.0), requests)
    free, expected = 0.0, []
    for t in at:
        free = max(free, t) + service_s
        expected.append(free)
    assert [request.ended for request in requests] == pytest.approx(expected)
    waited = np.mean([request.ended - request.issued for request in requests]) - service_s
    assert waited == pytest.approx(service_s * load / (2 * (1 - load)), rel=0.1)


def test_slots_are_filled_in_waves_on_all_instances() -> None:
    requests = same(40)
    lasted = run(system(entries=2), slots(4, 0.2, 0.1), requests)
    assert lasted == pytest.approx(5 * (0.2 + 3 * 0.1))


def test_a_saturated_engine_computes_a_context_step_and_a_step_for_each_further_token_of_a_batch() -> None:
    requests = same(16, n_output=5)
    lasted = run(system(), engines(BY_STEP), requests)
    assert lasted == pytest.approx(2 * 5 * STEP_S)
    first, per_token = latencies(requests)
    assert sorted(set(first.round(9).tolist())) == pytest.approx([STEP_S, 6 * STEP_S])
    assert per_token == pytest.approx(np.full(16, STEP_S))


def test_a_prompt_that_fits_no_step_is_computed_in_chunks() -> None:
    one = same(1, n_prompt=1000, n_output=1)
    config = replace(SCHEDULER, max_num_tokens=256, enable_chunked_context=True)
    assert run(system(), engines(BY_STEP, config), one) == pytest.approx(4 * STEP_S)


def test_a_cache_for_two_answers_runs_two_at_a_time() -> None:
    make = engines(BY_STEP, replace(SCHEDULER, batch_scheduler_policy="no_evict"), kv_cache_tokens=2 * 64)
    lasted = run(system(), make, same(8, n_prompt=40, n_output=20))
    assert lasted == pytest.approx(4 * 20 * STEP_S)


def test_a_small_cache_preempts_under_max_util_and_all_is_answered() -> None:
    few = run(system(), engines(BY_STEP, kv_cache_tokens=4 * 32), same(4, n_prompt=30, n_output=30))
    many = run(system(), engines(BY_STEP), same(4, n_prompt=30, n_output=30))
    assert many == pytest.approx(30 * STEP_S) and few > many


def test_a_handed_over_request_takes_its_context_its_handoff_and_its_steps() -> None:
    handoff = LinearTime(0.003, 0.0001)
    one = same(1, n_prompt=50, n_output=6)
    lasted = run(system(1, 1, handoff=handoff), engines(TIMES, split=True), one)
    assert one[0].first == pytest.approx(CONTEXT_S)
    assert lasted == pytest.approx(CONTEXT_S + 0.003 + 50 * 0.0001 + 5 * STEP_S)
    by_clock = run(system(1, 1, handoff=handoff), slots(4, 0.2, 0.1, split=True), same(1, 50, 6))
    assert by_clock == pytest.approx(0.2 + 0.003 + 50 * 0.0001 + 5 * 0.1)


def test_contexts_that_take_longer_decide_a_disaggregated_run() -> None:
    """A context at a time of `CONTEXT_S`; generation is through with each before the next comes."""
    config = replace(SCHEDULER, max_num_tokens=32)
    lasted = run(system(1, 1), engines(TIMES, config, split=True), same(20))
    assert lasted == pytest.approx(20 * CONTEXT_S + 3 * STEP_S)


def test_answers_of_one_token_end_at_the_context_instance() -> None:
    for make in (engines(BY_STEP, split=True), slots(8, 0.1, 0.1, split=True)):
        by_end_token = [SimulatedRequest(32, 1, 9) for _ in range(5)]
        requests = [*same(5, n_output=1), *by_end_token]
        run(system(1, 1), make, requests)
        assert all(request.first == request.ended for request in requests)


def test_a_generation_instance_without_room_holds_contexts_back() -> None:
    """One place to generate, and a context that keeps its place until it is handed over."""
    lasted = run(system(1, 1), slots(1, 0.1, 0.5, split=True), same(3, n_output=2))
    assert lasted == pytest.approx(0.1 + 3 * 0.5)


def test_instances_on_the_same_cores_slow_each_other_while_both_compute() -> None:
    shared = CoreSharing(2, 2.0)
    both = run(system(entries=2, sharing=shared), engines(BY_STEP), same(16, n_output=5))
    assert both == pytest.approx(2 * 5 * STEP_S)
    requests = [SimulatedRequest(32, 10, 10), SimulatedRequest(32, 4, 4)]
    run(system(entries=2, sharing=shared), engines(BY_STEP), requests)
    assert requests[1].ended == pytest.approx(2 * 4 * STEP_S)
    assert requests[0].ended == pytest.approx((2 * 4 + 6) * STEP_S)


def test_two_stages_have_two_steps_in_flight() -> None:
    """Each step holds half of the sequences, and a sequence is in every second one."""
    lasted = run(system(), engines(BY_STEP, stages=2), same(8, n_output=10))
    assert lasted == pytest.approx((2 * 10 - 1) * STEP_S, rel=0.06)


def test_a_step_that_is_alone_in_flight_goes_through_all_stages() -> None:
    """One sequence: no other step is in flight. Two: each waits for the other's step."""
    through = replace(BY_STEP, alone=1.8)
    one = run(system(), engines(through, stages=2), same(1, n_output=10))
    assert one == pytest.approx(10 * 1.8 * STEP_S)
    two = run(system(), engines(through, stages=2), same(2, n_output=10))
    assert two == pytest.approx(20 * STEP_S, rel=0.1)


def test_a_request_that_never_fits_is_an_error() -> None:
    with pytest.raises(StageError, match="would never be answered"):
        run(system(tokens=10), engines(BY_STEP), same(1))
