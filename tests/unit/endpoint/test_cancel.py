"""Requests that are asked for, streamed and cancelled through all roles of a run.

Messages come in any order that MPI allows.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpillm.endpoint.open_requests import PendingResponse
from mpillm.roles.generation import GenerationRole
from tests.helpers.served import MAX_BATCH, World, whole


@pytest.mark.parametrize("disaggregated", [False, True])
@pytest.mark.parametrize("timed", [False, True])
@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), n=st.integers(1, 40))
def test_nothing_is_left_of_cancelled_requests(disaggregated: bool, timed: bool, seed: int, n: int) -> None:
    """Each request ends once; one that is not cancelled has all its tokens.

    Ids that are used again are not taken for others.
    """
    world = World(seed, disaggregated, **({"ttft_ms": 0.001, "tpot_ms": 0.001} if timed else {}))
    chance, sent = world.chance, list[tuple[PendingResponse, list[int], int]]()
    for _ in range(n):
        prompt, n_output = (
            [chance.randrange(1000) for _ in range(chance.randrange(1, 5))],
            chance.randrange(1, 9),
        )
        sent.append((world.ask(prompt, n_output, chance.random() < 0.7), prompt, n_output))
        for _ in range(chance.randrange(40)):
            world.turn()
        if chance.random() < 0.5:
            world.open.give_up(chance.choice(sent)[0])
    world.settle()
    for answer, prompt, n_output in sent:
        assert answer.ended and not answer.failed
        expected = whole(prompt, n_output)
        assert (
            answer.tokens == expected
            if not answer.cancelled
            else answer.tokens == expected[: len(answer.tokens)]
        )
    world.check_unused()


@pytest.mark.parametrize("disaggregated", [False, True])
def test_tokens_come_one_by_one_to_those_who_stream(disaggregated: bool) -> None:
    world = World(3, disaggregated)
    streamed, plain = world.ask([5, 6], 6, stream=True), world.ask([5, 6], 6, stream=False)
    seen: dict[PendingResponse, list[int]] = {streamed: [], plain: []}
    quiet = 0
    while quiet < 200:
        quiet = 0 if world.turn() else quiet + 1
        for answer, lengths in seen.items():
            if len(answer.tokens) not in (0, *lengths):
                lengths.append(len(answer.tokens))
    assert seen[streamed] == [1, 2, 3, 4, 5, 6]
    assert len(seen[plain]) <= 2
    assert streamed.tokens == plain.tokens == whole([5, 6], 6)


def test_a_request_that_waits_at_the_leader_is_cancelled_there() -> None:
    world = World(0, False, ttft_ms=3_600_000.0)
    # as many as the instances hold, and three
    answers = [world.ask([i], 2, stream=False) for i in range(4 * MAX_BATCH + 3)]
    world.settle()
    assert sum(map(len, world.leader._waiting.values())) == 3
    world.open.give_up(answers[-2])
    world.settle()
    assert [answer.ended for answer in answers].count(True) == 1 and answers[-2].ended
    assert sum(map(len, world.leader._waiting.values())) == 2
    world.open.give_up_all()
    world.settle()
    world.check_unused()


def test_requests_that_wait_for_room_at_a_generation_instance_are_cancelled() -> None:
    """Their answers would take an hour each."""
    world = World(5, True, tpot_ms=3_600_000.0)
    answers = [world.ask([i], 2, stream=True) for i in range(4 * MAX_BATCH)]
    world.settle()
    receivers = [role._receiver for role in world.roles if isinstance(role, GenerationRole)]
    assert sum(len(receiver._waiting) for receiver in receivers) == 2 * MAX_BATCH, "offered, and without room"
    world.open.give_up_all()
    world.settle()
    assert all(answer.ended for answer in answers)
    world.check_unused()


def test_numbers_of_the_metrics() -> None:
    world = World(1, False)
    streamed = world.ask([1], 50, stream=True)
    assert (world.open.running, world.open.waiting) == (0, 1)
    while not streamed.tokens:
        world.turn()
    assert (world.open.running, world.open.waiting) == (1, 0)
    world.settle()
    assert (world.open.running, world.open.waiting) == (0, 0)
    assert np.diff([streamed.opened_at, streamed.first_at, streamed.last_at]).min() > 0
