"""Event loop of a rank. It owns MPI, and sleeps when there is no work."""

from __future__ import annotations

import threading
from collections.abc import Callable

from mpillm.comms.wakeup_socket import WakeupSocket
from mpillm.comms.watch import Watch
from mpillm.comms.yielding import never_yielding

_IDLE_SLEEP_S = 1200e-6  # after _IDLE_LOOKS polls without work; `bench routing` measures their CPU time
_IDLE_LOOKS = 256


class EventLoop:
    """Calls every poller in turn. A poller never waits, and returns whether it had work."""

    first_sleep_s = 20e-6
    max_sleep_s = 600e-6  # of a rank that must poll: limits the latency that a sleep adds to a message

    def __init__(self, watch: Watch, wakeup: WakeupSocket) -> None:
        self._watch = watch
        self._wakeup = wakeup
        self.pollers: list[Callable[[], bool]] = []
        self.quiet_s: list[Callable[[], float]] = []
        """Each returns the seconds for which its poller has no work unless this rank is woken."""
        self.inline_tasks: list[Callable[[], object]] = []
        """Tasks that a thread in `run_inline_or_wake` executes while the main thread sleeps."""
        self._turn = threading.Lock()  # the lock's holder may use MPI and the roles
        self._turn.acquire()  # the main thread releases it only to sleep
        self._must_poll = False
        self._error: BaseException | None = None  # of an inline task

    def wake(self) -> None:
        """Make the main thread poll. Any thread may call this."""
        self._wakeup.wake_own()

    def run_inline_or_wake(self) -> None:
        """Run the inline tasks in this thread if the main thread sleeps; otherwise make it poll.

        Inline tasks save a wake-up. Any thread may call this. `run_until` raises their exceptions in the main
        thread.
        """
        self._must_poll = True  # set first: the lock's holder reads this after the lock's release
        if not self._turn.acquire(blocking=False):
            return
        try:
            self._must_poll = not self.inline_tasks
            for task in self.inline_tasks:
                task()
            if self._quiet_s() <= 0:  # not after a small message, which usually leaves without help
                self._must_poll = True
        except BaseException as error:  # noqa: BLE001 - carried to the main thread, which raises it
            self._error = error
            self._must_poll = True
        finally:
            self._turn.release()
        if self._must_poll:
            self.wake()

    def run_until(self, done: Callable[[], bool]) -> None:
        """Poll until `done()`. Pollers raise errors; rank 0's control and the watch enforce deadlines."""
        with never_yielding():
            self._run_until(done)

    def _run_until(self, done: Callable[[], bool]) -> None:
        pause, idle = self.first_sleep_s, 0
        watch, wakeup = self._watch, self._wakeup
        while not done():
            worked = False
            for poll in self.pollers:
                if poll():
                    worked = True
            watch.tick()
            if worked:
                idle = 0
                continue
            idle += 1
            quiet_s = self._quiet_s() if wakeup.is_reliable else 0.0
            if self._sleep(quiet_s if quiet_s > 0 else pause) or quiet_s > 0:
                pause, idle = self.first_sleep_s, 0
            else:
                pause = min(pause * 1.5, self.max_sleep_s) if idle < _IDLE_LOOKS else _IDLE_SLEEP_S

    def _quiet_s(self) -> float:
        return min(quiet_s() for quiet_s in self.quiet_s)

    def _sleep(self, seconds: float) -> bool:
        """Sleep as `WakeupSocket.sleep` does, unless a thread has requested a poll. Inline tasks may run."""
        try:
            try:
                self._turn.release()
                woken = self._must_poll or self._wakeup.sleep(seconds)
            finally:
                self._turn.acquire()
        except BaseException:  # raised by a signal handler: the rank and its MPI will end
            self.inline_tasks.clear()
            raise
        self._must_poll = False
        if self._error is not None:
            raise self._error
        return woken
