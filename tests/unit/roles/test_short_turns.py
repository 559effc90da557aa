"""Which requests of conversations a generation instance computes itself."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mpillm.comms.messages import REQUEST
from mpillm.roles.pool import InstancePool
from mpillm.roles.short_turns import ShortTurns

NEED = 10


def requests(*pairs: tuple[int, int]) -> NDArray[np.void]:
    """Return requests, each by its session and the tokens of its prompt."""
    rows = np.zeros(len(pairs), REQUEST)
    rows["session"], rows["n_tokens"] = zip(*pairs, strict=True)
    return rows


def make() -> tuple[InstancePool, ShortTurns]:
    pool = InstancePool([3, 4], "load_balancing")
    for position in range(2):
        pool.grant(position, 2, 100)
    return pool, ShortTurns(pool, 16)


def position(turns: ShortTurns, session: int, n_tokens: int) -> int:
    return turns.position(requests((session, n_tokens))[0], NEED)


def test_later_turns_with_few_new_tokens() -> None:
    _, turns = make()
    assert position(turns, 7, 50) == -1  # its first turn
    turns.remember(requests((7, 50), (0, 50)), 1)
    assert position(turns, 7, 66) == 1
    assert position(turns, 7, 67) == -1  # too many
    assert position(turns, 7, 50) == -1  # a shorter prompt, or the same, is not its next turn
    assert position(turns, 0, 60) == -1  # of no conversation
    turns.remember(requests((7, 66)), 0)
    assert position(turns, 7, 70) == 0
    turns.forget_all()
    assert position(turns, 7, 70) == -1


def test_a_full_instance_computes_none() -> None:
    pool, turns = make()
    turns.remember(requests((7, 50)), 1)
    pool.take(1, np.array([95]))
    assert position(turns, 7, 60) == -1
    pool.return_credits(np.array([1]), np.array([95]))
    assert position(turns, 7, 60) == 1


def test_the_first_of_several_requests() -> None:
    _, turns = make()
    turns.remember(requests((7, 50)), 1)
    needs = np.full(3, NEED)
    assert turns.first(requests((8, 5), (7, 60), (7, 61)), needs) == 1
    assert turns.first(requests((8, 5), (9, 60), (6, 61)), needs) == 3
