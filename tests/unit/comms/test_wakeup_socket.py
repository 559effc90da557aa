"""Wake-up sockets of several ranks in one process, and the event loop that sleeps on one."""

from __future__ import annotations

import math
import os
import secrets
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import pytest

from mpillm.comms.loop import EventLoop
from mpillm.comms.wakeup_socket import WakeupSocket

SEVERAL = 10_000  # more than a socket keeps


@pytest.fixture
def opened() -> Callable[..., WakeupSocket]:
    """Return a function that opens a rank's socket; nothing else wakes the rank."""
    run = secrets.token_hex(8)

    def open_(rank: int, *node: int) -> WakeupSocket:
        wakeup = WakeupSocket()
        wakeup.short_sleep_s = wakeup.long_sleep_s = 120.0
        wakeup.open(run, rank, node or (0, 1, 2))
        return wakeup

    return open_


def test_another_rank_wakes_it(opened: Callable[..., WakeupSocket]) -> None:
    own, other = opened(0), opened(1)
    threading.Timer(0.05, other.probe_peers, [{0}]).start()
    assert own.sleep(math.inf)
    assert other.sleep(0.0) is False


def test_its_own_threads_wake_it(opened: Callable[..., WakeupSocket]) -> None:
    own = opened(0)
    threading.Timer(0.05, own.wake_own).start()
    assert own.sleep(math.inf)


def test_wakeups_without_end_do_not_occupy_the_rank(opened: Callable[..., WakeupSocket]) -> None:
    """Any process of the node may send wake-ups, again and again."""
    own = opened(0)
    own.wake_own()

    class Woken:
        def __init__(self, wakeup: Any) -> None:
            self.wakeup, self.taken = wakeup, 0  # the socket stays open

        def fileno(self) -> int:
            return int(self.wakeup.fileno())

        def recv(self, _: int) -> bytes:
            self.taken += 1
            assert self.taken < SEVERAL, "it never ends"
            return b"!"

    endless: Any = Woken(own._socket)
    own._socket = endless
    assert own.sleep(0.0)


def test_a_wakeup_before_the_sleep_counts_and_many_are_one(opened: Callable[..., WakeupSocket]) -> None:
    own = opened(0)
    for _ in range(SEVERAL):
        own.wake_own()
    assert own.sleep(math.inf)
    assert not own.sleep(0.001)


def test_all_peers_within_reach(opened: Callable[..., WakeupSocket]) -> None:
    sockets = [opened(rank) for rank in range(3)]
    for wakeup in sockets:
        assert not wakeup.is_reliable
        wakeup.probe_peers(range(3))
        assert wakeup.is_reliable


@pytest.mark.parametrize(("node", "peers"), [((0, 1), {1, 2}), ((0, 1, 2), {1, 3}), ((0, 1, 7), {1, 7})])
def test_a_peer_out_of_reach(
    node: tuple[int, ...], peers: set[int], opened: Callable[..., WakeupSocket]
) -> None:
    """A rank does not rely on wake-ups if a peer is on another node, unknown, or behind another network
    namespace."""
    own, _, _ = opened(0, *node), opened(1), opened(2)
    own.probe_peers(peers)
    assert not own.is_reliable


def test_a_name_that_is_taken(opened: Callable[..., WakeupSocket]) -> None:
    _, again = opened(0), opened(0)
    again.probe_peers(set())
    assert not again.is_reliable
    again.wake_own()


def test_the_end_of_a_process_wakes_it_once(opened: Callable[..., WakeupSocket]) -> None:
    own, ended = opened(0), []
    with subprocess.Popen(["sleep", "120"]) as first, subprocess.Popen(["sleep", "120"]) as second:
        own.watch_exits([first.pid, second.pid], lambda: ended.append(1))
        assert not own.sleep(0.001)
        # Not waited for: a zombie has ended, too.
        threading.Timer(0.05, first.kill).start()
        assert own.sleep(math.inf)
        assert ended == [1]
        assert not own.sleep(0.001)
        second.kill()
        assert own.sleep(math.inf)
        assert ended == [1, 1]


def test_a_rank_that_cannot_watch_an_exit_sleeps_shortly(opened: Callable[..., WakeupSocket]) -> None:
    """So that its control looks often. Nothing else wakes the rank here."""
    own = opened(0)
    own.short_sleep_s, own.may_sleep_long = 0.001, True
    with subprocess.Popen(["true"]) as ended:
        pass
    own.watch_exits([os.getpid(), ended.pid], lambda: None)
    assert not own.sleep(math.inf)


def test_a_rank_that_was_woken_sleeps_shortly(opened: Callable[..., WakeupSocket]) -> None:
    """A wake-up may arrive before its message is visible. An idle rank has only its heartbeat."""
    own = opened(0)
    own.short_sleep_s, own.awake_s = 0.001, 120.0
    own.may_sleep_long = True
    own.watch_exits([os.getpid()], lambda: None)
    for _ in range(2):
        threading.Timer(0.05, own.wake_own, kwargs={"beat": True}).start()
        assert own.sleep(math.inf)
    own.wake_own()
    assert own.sleep(math.inf)
    assert not own.sleep(math.inf)
    own.awake_s = 0.0
    own.wake_own()
    assert own.sleep(math.inf)
    own.may_sleep_long = False
    assert not own.sleep(math.inf)


def test_sockets_that_are_not_open() -> None:
    own = WakeupSocket()
    own.wake_own()
    own.probe_peers({1})
    assert not own.is_reliable


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
def test_a_quiet_rank_looks_when_it_is_woken(quiet_s: float, opened: Callable[..., WakeupSocket]) -> None:
    own, looker = opened(0), Looker()
    own.probe_peers(set())
    watch: Any = QuietWatch()
    loop = EventLoop(watch, own)
    loop.pollers.append(looker.poll)
    loop.quiet_s.append(lambda: quiet_s)

    def bring() -> None:
        looker.work.set()
        own.wake_own()

    for n in range(1, 6):
        threading.Timer(0.2, bring).start()
        loop.run_until(lambda: looker.found == n)  # noqa: B023 - called at once
    # One that polls looks more than a hundred times in each of the pauses.
    assert (looker.looks < 100) == (quiet_s > 0)


def test_a_rank_whose_message_still_moves_can_be_woken(opened: Callable[..., WakeupSocket]) -> None:
    """It looks again after a moment by itself, but a wake-up does not wait for that."""
    own, looker = opened(0), Looker()
    own.probe_peers(set())
    watch: Any = QuietWatch()
    loop = EventLoop(watch, own)
    loop.first_sleep_s = loop.max_sleep_s = 120.0
    loop.pollers.append(looker.poll)
    loop.quiet_s.append(lambda: 0.0)

    def bring() -> None:
        looker.work.set()
        own.wake_own()

    threading.Timer(0.2, bring).start()
    loop.run_until(lambda: looker.found == 1)


def test_a_rank_that_is_quiet_for_a_while_looks_again(opened: Callable[..., WakeupSocket]) -> None:
    """A core that simulates time has work again without a wake-up."""
    own, looker = opened(0), Looker()
    own.probe_peers(set())
    watch: Any = QuietWatch()
    loop = EventLoop(watch, own)
    loop.pollers.append(looker.poll)
    loop.quiet_s += [lambda: math.inf, lambda: 0.01]
    loop.run_until(lambda: looker.looks >= 20)
