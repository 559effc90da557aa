"""The event loop, and what another thread does for it while it sleeps."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from mpillm.comms.loop import EventLoop
from mpillm.comms.wakeup_socket import WakeupSocket

LONG_S = 20.0  # a sleep without a wake-up


class QuietWatch:
    def tick(self) -> None: ...


class Turns:
    """A loop of this thread, its turns, and what was done in which thread."""

    def __init__(self) -> None:
        wakeup = WakeupSocket()
        wakeup.short_sleep_s = wakeup.long_sleep_s = LONG_S
        wakeup.open(f"test-{id(self)}", 0, {0})
        wakeup.probe_peers(set())
        assert wakeup.is_reliable
        watch: Any = QuietWatch()
        self.loop = EventLoop(watch, wakeup)
        self.loop.pollers.append(self._poll)
        self.loop.quiet_s.append(lambda: self.quiet_s)
        self.loop.inline_tasks.append(lambda: self.did.append(threading.current_thread()))
        self.quiet_s = math.inf
        self.turns = 0
        self.at_turn: dict[int, Callable[[], None]] = {}
        self.did: list[threading.Thread] = []

    def _poll(self) -> bool:
        self.turns += 1
        self.at_turn.get(self.turns, lambda: None)()
        return False

    def in_a_thread(self, *calls: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            for call in calls:
                call()

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def run(self, turns: int = 1) -> float:
        """Run so many turns, and sleep once more; return the seconds it took."""
        started = time.monotonic()
        self.loop.run_until(lambda: self.turns >= turns)
        return time.monotonic() - started


@pytest.fixture
def turns() -> Turns:
    return Turns()


def asleep(turns: Turns) -> None:
    """Wait until the thread of the loop sleeps."""
    end = time.monotonic() + LONG_S
    while turns.loop._turn.locked() and time.monotonic() < end:
        time.sleep(0.001)


def test_inline_tasks_run_while_the_main_thread_sleeps(turns: Turns) -> None:
    thread = turns.in_a_thread(
        lambda: asleep(turns), turns.loop.run_inline_or_wake, turns.loop.run_inline_or_wake, turns.loop.wake
    )
    assert turns.run() < LONG_S
    assert turns.did == [thread, thread]


def test_a_main_thread_that_is_awake_looks_once_more_before_it_sleeps(turns: Turns) -> None:
    turns.at_turn[1] = lambda: turns.in_a_thread(turns.loop.run_inline_or_wake).join()
    turns.at_turn[2] = turns.loop.wake
    assert turns.run(2) < LONG_S
    assert turns.did == []


def test_what_an_inline_task_leaves_is_the_main_threads(turns: Turns) -> None:
    def leave() -> None:
        turns.quiet_s = 0.0

    turns.loop.inline_tasks.append(leave)
    turns.in_a_thread(lambda: asleep(turns), turns.loop.run_inline_or_wake)
    assert turns.run() < LONG_S
    assert len(turns.did) == 1


def test_without_inline_tasks_the_main_thread_is_woken(turns: Turns) -> None:
    turns.loop.inline_tasks.clear()
    turns.in_a_thread(lambda: asleep(turns), turns.loop.run_inline_or_wake)
    assert turns.run() < LONG_S


def test_what_an_inline_task_raises_is_raised_in_the_main_thread(turns: Turns) -> None:
    def fail() -> None:
        raise ValueError("broken")

    turns.loop.inline_tasks.append(fail)
    turns.in_a_thread(lambda: asleep(turns), turns.loop.run_inline_or_wake)
    with pytest.raises(ValueError, match="broken"):
        turns.run()
    turns.loop.run_inline_or_wake()  # as LoadGen's thread may, until the process has ended
    assert len(turns.did) == 1


def test_no_inline_task_runs_once_a_signal_has_ended_the_loop(turns: Turns) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(InterruptedError):
            turns.run()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    turns.in_a_thread(turns.loop.run_inline_or_wake).join()
    assert turns.did == []
