"""Which instance a pool chooses: of all at one look that with the least to do, of equals the next in turn."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mpillm.roles.pool import InstancePool

# Of each instance: requests and tokens that it can hold, and what it owes by now.
INSTANCES = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 20), st.lists(st.integers(1, 9), max_size=3)),
    min_size=1,
    max_size=21,
)


@given(INSTANCES, st.sampled_from(["load_balancing", "round_robin"]), st.integers(0, 21), st.integers(1, 10))
def test_the_choice_is_that_of_a_search_through_all(
    instances: list[tuple[int, int, list[int]]], policy: str, turn: int, need: int
) -> None:
    n = len(instances)
    pool = InstancePool(list(range(n)), policy)
    pool._turn = turn = turn % (n + 1)  # n: after the last one's turn
    for position, (requests, tokens, owed) in enumerate(instances):
        pool.grant(position, requests, tokens)
        pool.take(position, np.array(owed, np.int64))
    owes = [sum(owed) for _, _, owed in instances]
    there = [i for i, (n_, t, owed) in enumerate(instances) if n_ > len(owed) and t - owes[i] >= need]
    in_turn = sorted(there, key=lambda i: (i - turn) % n)
    expected = min(in_turn, key=lambda i: owes[i] if policy == "load_balancing" else 0, default=-1)
    assert pool.pick(np.array([need])) == (expected, int(expected >= 0))


def test_a_batch_goes_to_all_instances_in_equal_shares() -> None:
    pool = InstancePool(list(range(4)), "load_balancing")
    for position in range(4):
        pool.grant(position, 8, 1000)
    sent: list[int] = []
    while len(sent) < 16:
        position, count = pool.pick(np.full(16 - len(sent), 100))
        pool.take(position, np.full(count, 100))
        sent += [position] * count
    assert [sent.count(position) for position in range(4)] == [4] * 4
