"""Instances of different speeds and sizes: a test of a given number of requests ends near the ideal time."""

from __future__ import annotations

import heapq
import random

import numpy as np
import pytest

from mpillm.roles.pool import InstancePool

NEED = 100  # KV tokens of a request


def pool(slots: list[int], policy: str = "load_balancing") -> InstancePool:
    """Return a pool of instances that grant twice what they compute at once, as cores do."""
    made = InstancePool(list(range(len(slots))), policy)
    for position, n in enumerate(slots):
        made.grant(position, 2 * n, 2 * n * NEED)
    made.set_weights()
    return made


def played(
    made: InstancePool, slots: list[int], seconds: list[float], n: int, *, all_at_once: bool, seed: int = 0
) -> tuple[float, list[int]]:
    """Return when the last of `n` requests is answered, and how many each instance answers.

    Each computes as many as it has `slots` for at once, a request within 0.2 to 1.8 times its `seconds`.
    """
    chance = random.Random(seed)
    waiting, now = n, 0.0
    queued, running, answered = ([0] * len(slots) for _ in range(3))
    ends: list[tuple[float, int]] = []
    while True:
        while waiting:
            needs = np.full(waiting, NEED, np.int64)
            position, count = made.pick(needs, waiting * NEED if all_at_once else None)
            if not count:
                break
            made.take(position, needs[:count])
            waiting -= count
            queued[position] += count
        for position, size in enumerate(slots):
            while queued[position] and running[position] < size:
                queued[position] -= 1
                running[position] += 1
                heapq.heappush(ends, (now + seconds[position] * chance.uniform(0.2, 1.8), position))
        if not ends:
            assert not waiting, "nothing is under way, and requests wait"
            return now, answered
        now, position = heapq.heappop(ends)
        running[position] -= 1
        answered[position] += 1
        made.return_credits(np.array([position]), np.array([NEED]))


def mean(slots: list[int], seconds: list[float], n: int, policy: str, *, all_at_once: bool) -> float:
    """Return how long a test of `n` requests takes, as a multiple of the time without any waste."""
    ideal = n / sum(size / each for size, each in zip(slots, seconds, strict=True))
    runs = [
        played(pool(slots, policy), slots, seconds, n, all_at_once=all_at_once, seed=seed)[0]
        for seed in range(6)
    ]
    return sum(runs) / len(runs) / ideal


@pytest.mark.parametrize("policy", ["load_balancing", "round_robin"])
@pytest.mark.parametrize(
    ("slots", "seconds", "most"),
    [([8, 8], [3.0, 1.0], 1.03), ([8, 8], [10.0, 1.0], 1.06), ([4, 32], [3.0, 1.0], 1.06)],
)
def test_a_test_ends_when_it_could(policy: str, slots: list[int], seconds: list[float], most: float) -> None:
    """A slow instance is not given the last requests."""
    new, plain = (mean(slots, seconds, 1000, policy, all_at_once=rest) for rest in (True, False))
    assert new < most, new
    assert new < plain - 0.02, plain


@pytest.mark.parametrize("n", [1, 7, 33, 100, 500])
@pytest.mark.long
def test_equal_instances_take_no_longer(n: int) -> None:
    for count in (1, 2, 5):
        slots, seconds = [8] * count, [1.0] * count
        new, plain = (mean(slots, seconds, n, "load_balancing", all_at_once=rest) for rest in (True, False))
        assert new < 1.03 * plain, (n, count)


def test_an_instance_gets_a_share_of_what_it_can_hold() -> None:
    made = pool([4, 12])
    chosen = []
    for _ in range(16):
        position, count = made.pick(np.array([NEED]))
        made.take(position, np.full(count, NEED))
        chosen.append(position)
    assert chosen.count(0) == 4
    assert pool([4, 12]).pick(np.full(16, NEED)) == (0, 4), "of a batch, too"


def test_the_rest_goes_on_when_the_quick_one_is_lost() -> None:
    made = pool([8, 8])
    made.take(0, np.full(16, NEED))
    made.take(1, np.full(16, NEED))
    made.return_credits(np.array([1] * 30), np.full(30, NEED))  # it answers and answers
    made.take(1, np.full(30, NEED))
    made.return_credits(np.array([0]), np.array([NEED]))
    assert made.pick(np.full(3, NEED), 3 * NEED) == (-1, 0)  # the other is full, and so much quicker
    made.retire(1)
    assert made.pick(np.full(3, NEED), 3 * NEED)[0] == 0


@pytest.mark.parametrize("policy", ["load_balancing", "round_robin"])
def test_who_has_answered_nothing_yet_is_not_passed_over(policy: str) -> None:
    """Of four equals with room for two requests each the first to answer would have had all the rest."""
    slots, n = [1] * 4, 200
    took, answered = played(pool(slots, policy), slots, [1.0] * 4, n, all_at_once=True)
    assert min(answered) > n / 8
    made = pool(slots, policy)
    made.take(0, np.array([NEED]))
    made.return_credits(
        np.array([0]), np.array([NEED])
    )  # one has answered, and nobody else has had a request
    given = set()
    for left in range(5, 0, -1):
        position, count = made.pick(np.array([NEED]), left * NEED)
        assert count == 1
        made.take(position, np.array([NEED]))
        given.add(position)
    assert given == {0, 1, 2, 3}, took
