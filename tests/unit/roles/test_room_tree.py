"""The tree behind the policies answers as a search through all instances would, in about log(n) looks."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpillm.comms.messages import REQUEST, Batch
from mpillm.roles.pool import InstancePool
from mpillm.roles.prefix_pool import PrefixPool, PrefixRouting
from mpillm.roles.room_tree import RoomTree

INSTANCES = st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=21)


@given(INSTANCES, st.integers(0, 30), st.integers(0, 10))
def test_the_answers_are_those_of_a_search_through_all(
    instances: list[tuple[bool, int, int]], start: int, need: int
) -> None:
    n = len(instances)
    tree = RoomTree(n)
    for position, (takes, free, load) in enumerate(instances):
        tree.update(position, not takes, load, free)  # what it was before leaves no trace
        tree.update(position, takes, free, load)
    there = [i for i, (takes, free, _) in enumerate(instances) if takes and free >= need]
    in_turn = sorted(there, key=lambda i: (i - start) % n)
    assert tree.next_from(start, need) == (in_turn[0] if there else -1)
    assert tree.idlest(start, need) == min(in_turn, key=lambda i: instances[i][2], default=-1)
    assert tree.those_with(need) == (len(there), sum(instances[i][2] for i in there))


class Counting(list[int]):
    """Counts what is read of it."""

    looks = 0

    def __getitem__(self, i: Any) -> Any:
        Counting.looks += 1
        return super().__getitem__(i)


def counted(pool: InstancePool) -> InstancePool:
    """Return the same pool, whose tree counts looks."""
    tree = pool._tree
    for name in ("_most_free", "_least_free", "_least_load", "_weight", "_owed"):
        setattr(tree, name, Counting(getattr(tree, name)))
    return pool


def looks(work: Callable[[], object]) -> int:
    Counting.looks = 0
    work()
    return Counting.looks


def busy_pool(policy: str, n: int) -> InstancePool:
    """Instances with room for 8 requests; each has had up to 7, and every third is full."""
    pool: InstancePool = (
        PrefixPool(list(range(n)), PrefixRouting())
        if policy == "kv_cache_aware"
        else InstancePool(list(range(n)), policy)
    )
    random = np.random.default_rng(3)
    for position in range(n):
        pool.grant(position, 8, 1000)
        had = 8 if position % 3 == 0 else int(random.integers(0, 8))
        if had:
            pool.take(position, np.full(had, 100))
    return counted(pool)


def one_request(pool: InstancePool) -> None:
    """A request is sent and answered."""
    rows = np.zeros(1, REQUEST)
    rows["n_tokens"] = 65
    needs = np.array([90])
    (position,) = pool.assign(needs, Batch(rows, np.arange(65, dtype=np.int32))).tolist()
    pool.give_back(np.array([position]), needs)


@pytest.mark.parametrize("policy", ["round_robin", "load_balancing", "kv_cache_aware"])
def test_looks_per_request_grow_with_the_logarithm_of_the_instances(policy: str) -> None:
    for n in (64, 512, 4096):
        request = partial(one_request, busy_pool(policy, n))
        most = max(looks(request) for _ in range(64))
        # 2 updates of 8 reads on each level; a search that covers two ranges and walks down twice
        assert most <= 40 * (1 + math.log2(n)), (n, most)


def test_a_batch_over_all_instances_costs_a_logarithm_for_each_message() -> None:
    n = 4096
    pool = counted(InstancePool(list(range(n)), "load_balancing"))
    for position in range(n):
        pool.grant(position, 8, 1000)
    needs = np.full(2048, 100)
    sent = 0

    def send() -> None:
        nonlocal sent
        while sent < len(needs):
            position, count = pool.pick(needs[sent:])
            pool.take(position, needs[sent : sent + count])
            sent += count

    assert looks(send) <= 2048 * 60 * math.log2(n)


def test_the_fullest_system_has_no_room_at_one_look() -> None:
    pool = InstancePool(list(range(4096)), "load_balancing")
    for position in range(4096):
        pool.grant(position, 1, 10)
    counted(pool)
    assert looks(lambda: pool.pick(np.array([11]))) <= 4
