"""Instances that are lost at any moment: each request is answered once, as if nothing had happened.

All roles are in one process; messages of different pairs of ranks arrive in any order, those about the loss
included.
"""

from __future__ import annotations

import itertools
import time
from collections import deque

import pytest

from mpillm.endpoint.open_requests import PendingResponse
from mpillm.errors import RunError
from tests.helpers.served import World, whole


class LosingWorld(World):
    """Ranks that learn of a loss one after another; nothing is sent to the lost one from then on."""

    def __init__(self, seed: int, disaggregated: bool, **options: float) -> None:
        self.to_tell: list[tuple[int, int]] = []  # who, and of which instance
        super().__init__(seed, disaggregated, **options)
        self.ranks = list(range(len(self.roles)))  # of `roles`

    @property
    def left(self) -> int:
        """Return how many instances are left."""
        return len(self.roles) - 2

    def lose(self, instance: int) -> None:
        """Its rank does nothing more. What it has sent still arrives where the loss is not known yet."""
        rank = 2 + instance
        at = self.ranks.index(rank)
        del self.ranks[at], self.roles[at], self.cores[at - 2]
        self.to_tell = [(other, which) for other, which in self.to_tell if other != rank]
        self.to_tell += [(other, instance) for other in self.ranks]
        handlers = self.network.routes[rank].handlers
        handlers.update(dict.fromkeys(handlers, lambda received: None))
        for pair, messages in self.network.under_way.items():
            if pair[0] == rank:  # some of it has never left
                for _ in range(self.chance.randrange(len(messages) + 1)):
                    messages.pop()

    def turn(self) -> bool:
        """A rank learns of a loss, or what may happen in `World`."""
        if self.to_tell and self.chance.random() < 0.2:
            rank, instance = self.to_tell.pop(self.chance.randrange(len(self.to_tell)))
            self.network.forget(rank, 2 + instance)
            self.roles[self.ranks.index(rank)].lost(instance)
            return True
        return super().turn() or bool(self.to_tell)


LOSSES = [(False, [1]), (True, [0]), (True, [3]), (True, [1, 2]), (True, [2, 0])]


@pytest.mark.parametrize(("disaggregated", "lost"), LOSSES)
@pytest.mark.parametrize("timed", [False, True])
def test_every_request_is_answered_once_whatever_is_lost_and_when(
    disaggregated: bool, lost: list[int], timed: bool
) -> None:
    for seed in range(15):
        world = LosingWorld(seed, disaggregated, **({"ttft_ms": 0.001, "tpot_ms": 0.001} if timed else {}))
        to_lose = deque(lost)
        sent: list[tuple[list[int], int, PendingResponse]] = []
        for i in itertools.count():
            if i < 40:
                prompt, n = [seed + 1, i + 1, 7], world.chance.randrange(1, 6)
                sent.append((prompt, n, world.ask(prompt, n, stream=bool(i % 2))))
            elif not to_lose:
                break
            for _ in range(world.chance.randrange(6)):
                world.turn()
            if to_lose and world.chance.random() < 0.06:
                world.lose(to_lose.popleft())
        world.settle()
        for prompt, n, answer in sent:
            assert answer.ended and not answer.failed, (seed, answer.id)
            assert answer.tokens == whole(prompt, n), seed
            assert answer.released
        world.check_unused()


def test_cancelled_requests_of_a_lost_instance() -> None:
    """Their ids are freed once, whichever message is lost."""
    for seed in range(60):
        world = LosingWorld(seed, False, ttft_ms=0.001, tpot_ms=0.001)
        sent = [([i + 1], 5, world.ask([i + 1], 5, stream=bool(i % 2))) for i in range(12)]
        for _, _, answer in sent:
            for _ in range(world.chance.randrange(8)):
                world.turn()
            if world.chance.random() < 0.5:
                world.open.give_up(answer)
            if answer is sent[world.chance.randrange(12)][2] and world.left == 2:
                world.lose(0)
        if world.left == 2:
            world.lose(0)
        world.settle()
        for prompt, n, answer in sent:
            assert answer.ended and answer.released, seed
            assert answer.cancelled or answer.tokens == whole(prompt, n)
        world.check_unused()


def test_a_stream_goes_on_where_it_was() -> None:
    received: list[int] = []
    answer = PendingResponse(0, 3)
    for rows in ([1], [2], [3]):
        answer.add(rows, 1 if not received else 32)
        received += rows
    assert answer.tokens == [1, 2, 3]
    answer.begin_again()
    answer.add([2, 3], 32)  # of a generation instance, before the context instance's first token
    assert answer.tokens == [1, 2, 3]
    answer.add([1], 1)
    assert answer.tokens == [1, 2, 3]
    answer.add([4], 32)
    assert answer.tokens == [1, 2, 3, 4]
    answer.add([1, 2, 3, 4, 5], 2)
    assert answer.ended and not answer.failed and answer.tokens == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("rows", [[([9], 1)], [([1], 1), ([8], 32)], [([1, 3], 2)]])
def test_a_stream_that_comes_otherwise_the_second_time_is_an_error(rows: list[tuple[list[int], int]]) -> None:
    answer = PendingResponse(0, 3)
    answer.add([1], 1)
    answer.add([2], 32)
    answer.begin_again()
    for tokens, flags in rows:
        answer.add(tokens, flags)
    assert answer.ended and answer.failed
    assert answer.tokens == [1, 2]


def test_a_lost_instance_with_outstanding_requests_is_a_failure_of_the_leader() -> None:
    """If a lost instance still has outstanding requests, the run ends with an error instead of waiting."""
    world = LosingWorld(0, False, ttft_ms=3_600_000.0)
    answer = world.ask([1, 2], 3, stream=False)
    world.settle()
    (holder,) = (instance for instance, n in world.leader.outstanding_by_instance().items() if n)
    world.leader._lost.add(holder)
    with pytest.raises(RunError) as error:
        world.leader._check_stalls(time.monotonic() + 301)
    (failure,) = error.value.failures
    assert failure.rank == 1 and f"instance {holder} " in failure.cause
    assert not answer.ended
