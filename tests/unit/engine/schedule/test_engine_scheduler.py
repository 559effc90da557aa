"""Scheduler policies, chunking, stop words and cancellation give right answers and give every block back."""

from __future__ import annotations

import itertools
import zlib
from collections import deque

import numpy as np
import pytest

from mpillm.engine.refusal import refusal
from mpillm.engine.schedule.block_allocator import BlockAllocator
from mpillm.engine.schedule.prefix_cache import PrefixCache
from mpillm.engine.schedule.scheduler import Scheduler
from mpillm.engine.shape.engine_config import SchedulerConfig
from tests.helpers.hashing_engine import (
    CHUNKINGS,
    POLICIES,
    SIZE,
    answer,
    check_blocks,
    check_empty,
    make_engine,
    make_sequences,
    run,
    sequence,
)


@pytest.mark.parametrize(
    ("n_stages", "n_ahead", "window"), [(1, 0, 0), (1, 1, 0), (2, 0, 0), (3, 0, 0), (1, 1, 9), (3, 0, 5)]
)
@pytest.mark.parametrize(
    ("reuse", "host_blocks"), [(False, 0), (True, 0), (True, 3), (True, 40)], ids=["", "reuse", "3", "host"]
)
@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_answer_is_right_and_every_block_comes_back(
    policy: str, chunking: str, reuse: bool, host_blocks: int, n_stages: int, n_ahead: int, window: int
) -> None:
    """Answers are right although requests come at random, and some are cancelled at random in any state."""
    random = np.random.default_rng(zlib.crc32(f"{policy} {chunking} {reuse} {n_stages}".encode()))
    engine = make_engine(
        policy=policy,
        chunking=chunking,
        reuse=reuse,
        n_stages=n_stages,
        n_ahead=n_ahead,
        seed=1,
        window=window,
        host_blocks=host_blocks,
    )
    sequences = make_sequences(60, random)
    to_come, cancelled = deque(sequences), set()
    firsts: set[int] = set()
    ended: dict[int, bool] = {}  # whether the end was that of a cancelled one
    for _ in range(20_000):
        if to_come and random.random() < 0.3:
            assert refusal(to_come[0], engine.info, engine.config) is None
            engine.add(to_come.popleft())
        if random.random() < 0.15:
            n_added = len(sequences) - len(to_come)
            # some have ended, and one is not there yet
            chosen = int(random.integers(max(0, n_added - 10), n_added + 1))
            engine.cancel(chosen)
            engine.cancel(chosen)
            if chosen < n_added and chosen not in ended:
                cancelled.add(chosen)
        for s, is_first, is_final in engine.step():
            assert s.id not in ended
            if is_first:
                assert s.id not in firsts
                firsts.add(s.id)
            if is_final:
                ended[s.id] = s.is_cancelled
        check_blocks(engine)
        if not to_come and len(ended) == len(sequences):
            break
    assert set(ended) == set(range(60))
    assert {i for i, was_cancelled in ended.items() if was_cancelled} == cancelled
    assert 5 < len(cancelled) < 55
    for s in sequences:
        wanted = answer(s.prompt, s.max_output, window)
        assert s.output == wanted or (s.is_cancelled and s.output == wanted[: len(s.output)])
    run(engine)  # a step may be in flight whose tokens nobody waits for
    check_empty(engine)
    if policy != "max_util":
        assert engine.scheduler.preemptions == 0
    if isinstance(engine.blocks, PrefixCache):
        assert engine.blocks.reused_blocks > 0
        if host_blocks == 40 and policy == "max_util":
            assert engine.blocks.host is not None and engine.blocks.host.loaded_blocks > 0


# --- policies ---


@pytest.mark.parametrize("policy", POLICIES)
def test_who_evicts(policy: str) -> None:
    engine = make_engine(n_blocks=20, policy=policy)
    for i in range(10):
        engine.add(sequence(i, [i] * 10, 40))
    run(engine)
    check_empty(engine)
    assert (engine.scheduler.preemptions > 0) == (policy == "max_util")


def test_no_evict_starts_what_can_end() -> None:
    """A context of 10 tokens and 30 answer tokens need 10 blocks: with 25 blocks two sequences start, and a
    third waits until one has ended."""
    engine = make_engine(n_blocks=25, policy="no_evict")
    for i in range(3):
        engine.add(sequence(i, [i] * 10, 31))
    for _ in range(3):
        engine.step()
    assert (len(engine.scheduler.running), len(engine.scheduler.waiting)) == (2, 1)
    engine.cancel(0)
    engine.step()
    assert [s.id for s in engine.scheduler.running] == [1, 2]


@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize("n_stages", [1, 2])
def test_a_static_batch_runs_to_its_end(chunking: str, n_stages: int) -> None:
    engine = make_engine(n_blocks=60, policy="static", chunking=chunking, n_stages=n_stages)
    random = np.random.default_rng(3)
    for s in make_sequences(40, random):
        engine.add(s)
    batches: list[set[int]] = []
    ended: set[int] = set()
    while engine.has_work() or engine._in_flight:
        ended |= {s.id for s, _, is_final in engine.step() if is_final}
        running = {s.id for s in engine.scheduler.running}
        if not batches or not running <= batches[-1]:
            assert not batches or batches[-1] <= ended, "somebody came before the batch had ended"
            batches.append(running)
    assert ended == set(range(40))
    assert sorted(itertools.chain.from_iterable(batches)) == list(range(40))
    assert max(map(len, batches)) == engine.config.max_batch_size, "a batch is not what fits one step"


# --- chunking ---


def chunks(chunking: str, lengths: list[int], max_num_tokens: int, n_in_flight: int = 1) -> list[int]:
    """Return the number of tokens of each sequence in the first step."""
    config = SchedulerConfig(
        16, max_num_tokens, SIZE, enable_chunked_context=True, context_chunking_policy=chunking
    )
    scheduler = Scheduler(config, BlockAllocator(1000), n_in_flight)
    for i, n in enumerate(lengths):
        scheduler.add(sequence(i, [1] * n))
    found = dict.fromkeys(range(len(lengths)), 0) | {s.id: n for s, n in scheduler.plan()}
    return list(found.values())


def test_chunks() -> None:
    assert chunks("first_come_first_served", [100, 10, 50, 3], 40) == [40, 0, 0, 0]
    assert chunks("first_come_first_served", [20, 10, 50, 3], 40) == [20, 10, 10, 0]
    assert chunks("equal_progress", [100, 10, 50, 3], 40) == [14, 10, 13, 3]
    assert chunks("equal_progress", [100, 100, 100], 40) == [14, 13, 13]
    assert chunks("equal_progress", [5, 6, 7], 40) == [5, 6, 7]
    assert chunks("equal_progress", [50] * 5, 3) == [1, 1, 1, 0, 0]
    assert chunks("equal_progress", [50] * 5, 30, n_in_flight=2) == [10, 10, 10, 0, 0]


def test_equal_progress_is_equal() -> None:
    """In each step all sequences that want more get the same, give or take a token, and a step is full as
    long as any wants more."""
    config = SchedulerConfig(
        16, 50, SIZE, enable_chunked_context=True, context_chunking_policy="equal_progress"
    )
    scheduler = Scheduler(config, BlockAllocator(1000))
    sequences = [sequence(i, [1] * n) for i, n in enumerate([300, 90, 200, 40])]
    for s in sequences:
        scheduler.add(s)
    while any(s.n_uncached > 1 for s in sequences):
        plan = scheduler.plan()
        scheduler.commit(plan)
        more = [n for s, n in plan if s.n_uncached]
        assert not more or (sum(n for _, n in plan) == 50 and max(more) - min(more) <= 1)
        for s in sequences:
            if s.n_uncached == 0 and not s.output:
                s.output.append(1)


def plans(scheduler: Scheduler, n_steps: int) -> list[dict[int, int]]:
    """Return the tokens of each sequence in the next steps, each of which has its tokens at once."""
    found = []
    for _ in range(n_steps):
        plan = scheduler.plan()
        scheduler.commit(plan)
        for s, _ in plan:
            if s.n_uncached == 0:
                s.output.append(1)
        found.append({s.id: n for s, n in plan})
    return found


def test_a_prompt_as_long_as_a_step_takes_turns_with_decode() -> None:
    """It never fits beside a generating sequence: it would wait until none is left."""
    scheduler = Scheduler(SchedulerConfig(16, 50, SIZE), BlockAllocator(1000))
    sequences = [sequence(i, [1] * n) for i, n in enumerate([50, 50, 20, 20, 49])]
    for s in sequences:
        scheduler.add(s)
    assert plans(scheduler, 8) == [
        {0: 50},
        {0: 1},
        {1: 50},
        {0: 1, 1: 1, 2: 20, 3: 20},
        {0: 1, 1: 1, 2: 1, 3: 1},
        {4: 49},
        *[dict.fromkeys(range(5), 1)] * 2,
    ]


def test_a_preempted_sequence_longer_than_a_step_goes_in_pieces() -> None:
    """With its answer it is longer than any prompt may be, and steps never have more than their tokens."""
    scheduler = Scheduler(SchedulerConfig(16, 50, SIZE), BlockAllocator(1000))
    first, second = sequence(0, [1] * 40), sequence(1, [1] * 30)
    second.output += [1] * 75
    for s in (first, second):
        scheduler.add(s)
    assert plans(scheduler, 7) == [{0: 40}, {0: 1}, {1: 50}, {0: 1}, {1: 50}, {0: 1, 1: 5}, {0: 1, 1: 1}]


# --- stop words ---


def test_stop_words() -> None:
    prompt = [3, 1, 4]
    whole = answer(prompt, 20)
    words = (tuple(whole[4:7]), (whole[9],), (96, *whole[11:13]), tuple(whole[15:17]), (prompt[-1], whole[0]))

    def ends(min_output: int) -> int:
        engine = make_engine(stop_words=words)
        s = sequence(0, prompt, 20, min_output=min_output)
        engine.add(s)
        run(engine)
        check_empty(engine)
        assert s.output == whole[: len(s.output)]
        return len(s.output)

    assert len(set(whole[:17])) == 17, "a word must not come twice in this answer"
    assert [ends(n) for n in (0, 7, 8, 10, 11, 17, 18)] == [7, 7, 10, 10, 17, 17, 20]


# --- cancelling ---


def test_cancel_a_request_that_waits() -> None:
    engine = make_engine(max_batch_size=1)
    engine.add(sequence(0, [1] * 5, 3))
    engine.add(sequence(1, [2] * 5, 3))
    engine.step()
    engine.cancel(1)
    assert [(p.sequence.id, p.is_first, p.is_final) for p in engine.step()] == [(1, False, True)]
    run(engine)
    check_empty(engine)


def test_cancel_a_request_in_its_context() -> None:
    engine = make_engine(max_num_tokens=4)
    engine.add(sequence(0, [1] * 15, 3))
    engine.step()
    assert 0 < engine.scheduler.running[0].n_cached < 15
    engine.cancel(0)
    assert engine.has_work()
    assert [(p.sequence.id, p.is_first, p.is_final) for p in engine.step()] == [(0, False, True)]
    check_empty(engine)


@pytest.mark.parametrize("n_steps", [1, 4])
def test_a_request_in_flight_keeps_its_blocks_until_its_step_has_ended(n_steps: int) -> None:
    engine = make_engine(n_stages=2)
    s = sequence(0, [1] * 10, 9)
    engine.add(s)
    for _ in range(200):
        engine.step()
        if len(s.output) >= n_steps - 1 and s.in_flight:
            break
    engine.cancel(0)
    engine.cancel(0)
    assert s.in_flight and s.blocks
    check_blocks(engine)
    results = []
    for _ in range(200):
        results += engine.step()
    assert [(p.sequence.id, p.is_first, p.is_final) for p in results] == [(0, False, True)]
    check_empty(engine)
