"""Bells of several ranks in one process, and the event loop that sleeps by one."""

from __future__ import annotations

import math
import os
import secrets
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import pytest

from mpillm.comms.doorbell import Doorbell
from mpillm.comms.loop import EventLoop

SEVERAL = 10_000  # more than a socket keeps


@pytest.fixture
def hung() -> Callable[..., Doorbell]:
    """Return a function that hangs a rank's bell; nothing else wakes the rank."""
    run = secrets.token_hex(8)

    def hang(rank: int, *node: int) -> Doorbell:
        bell = Doorbell()
        bell.short_sleep_s = bell.long_sleep_s = 120.0
        bell.hang(run, rank, node or (0, 1, 2))
        return bell

    return hang


def test_another_rank_wakes_it(hung: Callable[..., Doorbell]) -> None:
    mine, other = hung(0), hung(1)
    threading.Timer(0.05, other.try_all, [{0}]).start()
    assert mine.sleep(math.inf)
    assert other.sleep(0.0) is False


def test_its_own_threads_wake_it(hung: Callable[..., Doorbell]) -> None:
    mine = hung(0)
    threading.Timer(0.05, mine.ring_own).start()
    assert mine.sleep(math.inf)


def test_a_bell_that_never_stops_keeps_nobody(hung: Callable[..., Doorbell]) -> None:
    """Any process of the node may ring, again and again."""
    mine = hung(0)
    mine.ring_own()

    class Rung:
        def __init__(self, bell: Any) -> None:
            self.bell, self.taken = bell, 0  # the bell stays open

        def fileno(self) -> int:
            return int(self.bell.fileno())

        def recv(self, _: int) -> bytes:
            self.taken += 1
            assert self.taken < SEVERAL, "it never ends"
            return b"!"

    rung: Any = Rung(mine._socket)
    mine._socket = rung
    assert mine.sleep(0.0)


def test_a_bell_before_the_sleep_counts_and_many_are_one(hung: Callable[..., Doorbell]) -> None:
    mine = hung(0)
    for _ in range(SEVERAL):
        mine.ring_own()
    assert mine.sleep(math.inf)
    assert not mine.sleep(0.001)


def test_all_peers_within_reach(hung: Callable[..., Doorbell]) -> None:
    bells = [hung(rank) for rank in range(3)]
    for bell in bells:
        assert not bell.heard
        bell.try_all(range(3))
        assert bell.heard


@pytest.mark.parametrize(("node", "peers"), [((0, 1), {1, 2}), ((0, 1, 2), {1, 3}), ((0, 1, 7), {1, 7})])
def test_a_peer_out_of_reach(node: tuple[int, ...], peers: set[int], hung: Callable[..., Doorbell]) -> None:
    """A rank does not rely on its bell if a peer is on another node, unknown, or behind another network
    namespace."""
    mine, _, _ = hung(0, *node), hung(1), hung(2)
    mine.try_all(peers)
    assert not mine.heard


def test_a_name_that_is_taken(hung: Callable[..., Doorbell]) -> None:
    _, again = hung(0), hung(0)
    again.try_all(set())
    assert not again.heard
    again.ring_own()


def test_the_end_of_a_process_wakes_it_once(hung: Callable[..., Doorbell]) -> None:
    mine, ended = hung(0), []
    with subprocess.Popen(["sleep", "120"]) as first, subprocess.Popen(["sleep", "120"]) as second:
        mine.hear_ends([first.pid, second.pid], lambda: ended.append(1))
        assert not mine.sleep(0.001)
        # Not waited for: a zombie has ended, too.
        threading.Timer(0.05, first.kill).start()
        assert mine.sleep(math.inf)
        assert ended == [1]
        assert not mine.sleep(0.001)
        second.kill()
        assert mine.sleep(math.inf)
        assert ended == [1, 1]


def test_a_rank_that_can_not_hear_an_end_sleeps_shortly(hung: Callable[..., Doorbell]) -> None:
    """So that its control looks often; one that hears it is woken by nothing else here."""
    mine = hung(0)
    mine.short_sleep_s, mine.may_rest = 0.001, True
    with subprocess.Popen(["true"]) as ended:
        pass
    mine.hear_ends([os.getpid(), ended.pid], lambda: None)
    assert not mine.sleep(math.inf)


def test_a_rank_that_is_asked_things_sleeps_shortly(hung: Callable[..., Doorbell]) -> None:
    """A bell may be rung too early for its message to be seen. A rank at rest has only its heartbeat."""
    mine = hung(0)
    mine.short_sleep_s, mine.awake_s = 0.001, 120.0
    mine.may_rest = True
    mine.hear_ends([os.getpid()], lambda: None)
    for _ in range(2):
        threading.Timer(0.05, mine.ring_own, kwargs={"beat": True}).start()
        assert mine.sleep(math.inf)
    mine.ring_own()
    assert mine.sleep(math.inf)
    assert not mine.sleep(math.inf)
    mine.awake_s = 0.0
    mine.ring_own()
    assert mine.sleep(math.inf)
    mine.may_rest = False
    assert not mine.sleep(math.inf)


def test_bells_that_do_not_hang() -> None:
    mine = Doorbell()
    mine.ring_own()
    mine.try_all({1})
    assert not mine.heard


class QuietWatch:
    def tick(self) -> None: ...


class Looker:
    """Finds work as soon as there is any."""

    def __init__(self) -> None:
        self.looks = self.found = 0
        self.work = threading.Event()

    def poll(self) -> bool:
        self.looks += 1
        if not self.work.is_set():
            return False
        self.work.clear()
        self.found += 1
        return True


@pytest.mark.parametrize("quiet_s", [math.inf, 0.0])
def test_a_quiet_rank_looks_when_its_bell_rings(quiet_s: float, hung: Callable[..., Doorbell]) -> None:
    mine, looker = hung(0), Looker()
    mine.try_all(set())
    watch: Any = QuietWatch()
    loop = EventLoop(watch, mine)
    loop.pollers.append(looker.poll)
    loop.quiet_s.append(lambda: quiet_s)

    def bring() -> None:
        looker.work.set()
        mine.ring_own()

    for n in range(1, 6):
        threading.Timer(0.2, bring).start()
        loop.run_until(lambda: looker.found == n)  # noqa: B023 - called at once
    # One that polls looks more than a hundred times in each of the pauses.
    assert (looker.looks < 100) == (quiet_s > 0)


def test_a_rank_whose_message_still_moves_hears_its_bell(hung: Callable[..., Doorbell]) -> None:
    """It looks again after a moment by itself, but whoever rings meanwhile is not kept waiting for it."""
    mine, looker = hung(0), Looker()
    mine.try_all(set())
    watch: Any = QuietWatch()
    loop = EventLoop(watch, mine)
    loop.first_sleep_s = loop.longest_sleep_s = 120.0
    loop.pollers.append(looker.poll)
    loop.quiet_s.append(lambda: 0.0)

    def bring() -> None:
        looker.work.set()
        mine.ring_own()

    threading.Timer(0.2, bring).start()
    loop.run_until(lambda: looker.found == 1)


def test_a_rank_that_is_quiet_for_a_while_looks_again(hung: Callable[..., Doorbell]) -> None:
    """A core that simulates time has work again without a ring."""
    mine, looker = hung(0), Looker()
    mine.try_all(set())
    watch: Any = QuietWatch()
    loop = EventLoop(watch, mine)
    loop.pollers.append(looker.poll)
    loop.quiet_s += [lambda: math.inf, lambda: 0.01]
    loop.run_until(lambda: looker.looks >= 20)
