"""Credits and policies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpillm.comms.messages import REQUEST, Batch
from mpillm.options.fields import AllFields
from mpillm.roles.pool import InstancePool
from mpillm.roles.prefix_pool import PrefixRouting, make_pool

POLICIES = AllFields.traffic_distribution_policy.choices


def pool(policy: str, requests: list[int], tokens: list[int] | None = None) -> InstancePool:
    """Return a pool of instances 10, 11, … with these credits."""
    made = InstancePool([10 + i for i in range(len(requests))], policy)
    for i, n in enumerate(requests):
        made.grant(i, n, tokens[i] if tokens else 1 << 40)
    return made


def send(made: InstancePool, needs: list[int]) -> list[tuple[int, int]]:
    """Send as much as there is room for; return (position, number of requests) of each message."""
    waiting = np.array(needs, np.int64)
    sent = []
    while len(waiting):
        position, n = made.pick(waiting)
        if not n:
            break
        made.take(position, waiting[:n])
        sent.append((position, n))
        waiting = waiting[n:]
    return sent


@pytest.mark.parametrize("policy", POLICIES)
def test_single_requests_are_spread_over_quiet_instances(policy: str) -> None:
    made = pool(policy, [9, 9, 9])
    chosen = []
    for _ in range(9):
        ((position, _),) = send(made, [5])
        made.return_credits(np.array([position]), np.array([5]))
        chosen.append(position)
    assert chosen == [0, 1, 2] * 3


def test_round_robin_keeps_its_turn_whatever_is_owed() -> None:
    made = pool("round_robin", [9, 9])
    assert [send(made, [n])[0][0] for n in (1000, 1, 1, 1)] == [0, 1, 0, 1]


def test_load_balancing_goes_where_the_fewest_tokens_are_owed() -> None:
    made = pool("load_balancing", [9, 9])
    assert [send(made, [n])[0][0] for n in (1000, 1, 1, 1)] == [0, 1, 1, 1]
    made.return_credits(np.array([0]), np.array([1000]))
    assert send(made, [1])[0][0] == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_instances_without_room_are_passed_over(policy: str) -> None:
    made = pool(policy, [1, 0, 2])
    assert sorted(position for position, n in send(made, [1] * 5) for _ in range(n)) == [0, 2, 2]
    assert made.pick(np.array([1])) == (-1, 0)
    made.return_credits(np.array([2, 2]), np.array([1, 1]))
    assert made.pick(np.array([1]))[0] == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_an_instance_that_is_lost_gets_nothing_more(policy: str) -> None:
    made = pool(policy, [9, 9, 9])
    made.retire(1)
    assert {position for position, _ in send(made, [1] * 30)} == {0, 2}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_waits_for_tokens(policy: str) -> None:
    made = pool(policy, [9, 9], [100, 50])
    assert made.pick(np.array([101])) == (-1, 0)
    assert made.pick(np.array([60]))[0] == 0
    assert send(made, [60, 50, 40, 1])[:3] == [(0, 1), (1, 1), (0, 1)]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_large_batch_is_one_message_for_each_instance(policy: str) -> None:
    made = pool(policy, [1000] * 4)
    sent = send(made, [10] * 400)
    assert sorted(position for position, _ in sent) == [0, 1, 2, 3]
    assert [n for _, n in sent] == [100] * 4


@given(
    st.sampled_from(POLICIES),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 60)), min_size=1, max_size=4),
    st.data(),
)
def test_credits_are_never_overdrawn_and_always_come_back(
    policy: str, granted: list[tuple[int, int]], data: st.DataObject
) -> None:
    made = pool(policy, [n for n, _ in granted], [t for _, t in granted])
    out: list[tuple[int, int]] = []  # position, need
    for _ in range(data.draw(st.integers(0, 12))):
        if out and bool(data.draw(st.booleans())):
            ended = [out.pop(data.draw(st.integers(0, len(out) - 1)))]
            made.return_credits(np.array([p for p, _ in ended]), np.array([n for _, n in ended]))
        else:
            needs = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=8))
            waiting = np.array(needs, np.int64)
            position, n = made.pick(waiting)
            assert n <= len(needs)
            if n == 0:
                assert not any(
                    f > 0 and t >= needs[0] for f, t in zip(made.free_requests, made.free_tokens, strict=True)
                )
            else:
                made.take(position, waiting[:n])
                out += [(position, need) for need in needs[:n]]
        assert (made.free_requests >= 0).all()
        assert (made.free_tokens >= 0).all()
        for i in range(len(granted)):
            assert made.outstanding_requests[i] == sum(p == i for p, _ in out)
            assert made.outstanding_tokens[i] == sum(n for p, n in out if p == i)
    made.return_credits(np.array([p for p, _ in out], np.int64), np.array([n for _, n in out], np.int64))
    assert made.free_requests.tolist() == [n for n, _ in granted]
    assert made.free_tokens.tolist() == [t for _, t in granted]


def test_positions_are_by_instance_number() -> None:
    assert [InstancePool([4, 7], "round_robin").position(i) for i in (4, 7)] == [0, 1]


@pytest.mark.parametrize("policy", ["load_balancing", "round_robin", "kv_cache_aware"])
def test_a_lost_instance_gets_nothing_more(policy: str) -> None:
    made = make_pool([4, 7], policy, PrefixRouting())
    for position in (0, 1):
        made.grant(position, 100, 10_000)
    needs, rows = np.full(6, 10, np.int64), np.zeros(6, REQUEST)
    rows["n_tokens"] = 2
    requests = Batch(rows, np.arange(12, dtype=np.int32))
    assert len(made.assign(needs, requests))
    made.retire(1)
    sent = 0
    for _ in range(20):
        positions = made.assign(needs, requests)
        assert set(positions.tolist()) <= {0}
        sent += len(positions)
    assert sent > 50
    assert made.outstanding_requests[1] == made.free_requests[1] == 0
