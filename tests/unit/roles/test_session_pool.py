"""Policy conversation: who keeps a conversation, and when another instance gets its request."""

from __future__ import annotations

import numpy as np

from mpillm.comms.messages import REQUEST, Batch
from mpillm.roles import session_pool
from mpillm.roles.prefix_pool import PrefixRouting, make_pool
from mpillm.roles.session_pool import SessionPool


def pool(n: int = 3, max_batch_size: int = 4, requests: int = 100) -> SessionPool:
    made = make_pool([10 + i for i in range(n)], "conversation", PrefixRouting(32, max_batch_size))
    assert isinstance(made, SessionPool)
    for position in range(n):
        made.grant(position, requests, 10_000)
    return made


def assign(to: SessionPool, *sessions: int, need: int = 10) -> list[int]:
    rows = np.zeros(len(sessions), REQUEST)
    rows["session"] = sessions
    chosen: list[int] = to.assign(np.full(len(sessions), need), Batch(rows, np.zeros(0, np.int32))).tolist()
    return chosen


def test_a_conversation_stays_and_new_ones_are_spread() -> None:
    made = pool()
    first = assign(made, 5, 6, 7)
    assert sorted(first) == [0, 1, 2]
    made.return_credits(np.array(first), np.full(3, 10))
    assert assign(made, 7, 5, 6) == [first[2], first[0], first[1]]


def test_a_busy_instance_loses_the_conversation() -> None:
    """It does with as many more requests as outweigh a cached prompt; then the other one keeps it."""
    made = pool(2)
    (holder,) = assign(made, 5)
    assert assign(made, 5, 5, 5) == [holder] * 3
    assert assign(made, 5) == [1 - holder]
    made.return_credits(np.full(4, holder), np.full(4, 10))
    assert assign(made, 5) == [1 - holder]


def test_without_credits_or_after_a_loss_another_instance_gets_it() -> None:
    made = pool(2, requests=2)
    (holder,) = assign(made, 5)
    made.retire(holder)
    assert assign(made, 5, 5) == [1 - holder] * 2
    assert assign(made, 5) == []


def test_requests_without_a_conversation_go_to_the_least_loaded() -> None:
    made = pool(2)
    assert sorted(assign(made, 0, 0)) == [0, 1] and not made._holders


def test_the_oldest_conversations_are_forgotten() -> None:
    made = pool(2, max_batch_size=1 << 20, requests=1 << 20)
    limit = session_pool.MAX_SESSIONS
    assign(made, *range(1, limit + 3), need=0)
    assert len(made._holders) == limit and 1 not in made._holders and limit + 2 in made._holders
