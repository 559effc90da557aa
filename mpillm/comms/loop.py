"""A rank's one event loop: it owns MPI, and sleeps when there is nothing to do."""

from __future__ import annotations

import threading
from collections.abc import Callable

from mpillm.comms.doorbell import Doorbell
from mpillm.comms.watch import Watch
from mpillm.comms.yielding import never_waiting

_IDLE_SLEEP_S = 1200e-6  # after _IDLE_LOOKS without work; `bench routing` measures a look's CPU time
_IDLE_LOOKS = 256


class EventLoop:
    """Calls every poller in turn; a poller never waits, and returns whether it found work."""

    first_sleep_s = 20e-6
    longest_sleep_s = 600e-6  # where this rank must poll: bounds the latency that it adds to a message

    def __init__(self, watch: Watch, doorbell: Doorbell) -> None:
        self._watch = watch
        self._doorbell = doorbell
        self.pollers: list[Callable[[], bool]] = []
        self.quiet_s: list[Callable[[], float]] = []
        """Each says for how long its poller will find nothing unless somebody rings this rank's bell."""
        self.errands: list[Callable[[], object]] = []
        """What a thread that calls `ask` does for the main thread while that sleeps."""
        self._turn = threading.Lock()  # who has it may touch MPI and the roles
        self._turn.acquire()  # the main thread gives it back only to sleep
        self._asked = False
        self._error: BaseException | None = None  # of an errand

    def wake(self) -> None:
        """Have the main thread look. Any thread may call this."""
        self._doorbell.ring_own()

    def ask(self) -> None:
        """Do the errands in this thread if the main thread sleeps, which saves waking it; else it will look.

        Any thread may call this. What an errand raises, `run_until` raises in the main thread.
        """
        self._asked = True  # first: who has the lock sees it after giving the lock back
        if not self._turn.acquire(blocking=False):
            return
        try:
            self._asked = not self.errands
            for errand in self.errands:
                errand()
            if self._quiet_s() <= 0:  # not for a small message: as a rule it leaves by itself
                self._asked = True
        except BaseException as error:  # noqa: BLE001 - carried to the main thread, which raises it
            self._error = error
            self._asked = True
        finally:
            self._turn.release()
        if self._asked:
            self.wake()

    def run_until(self, done: Callable[[], bool]) -> None:
        """Poll until `done()`. Pollers raise errors; rank 0's control and the watch enforce deadlines."""
        with never_waiting():
            self._run_until(done)

    def _run_until(self, done: Callable[[], bool]) -> None:
        pause, idle = self.first_sleep_s, 0
        watch, doorbell = self._watch, self._doorbell
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
            quiet_s = self._quiet_s() if doorbell.heard else 0.0
            if self._sleep(quiet_s if quiet_s > 0 else pause) or quiet_s > 0:
                pause, idle = self.first_sleep_s, 0
            else:
                pause = min(pause * 1.5, self.longest_sleep_s) if idle < _IDLE_LOOKS else _IDLE_SLEEP_S

    def _quiet_s(self) -> float:
        return min(quiet_s() for quiet_s in self.quiet_s)

    def _sleep(self, seconds: float) -> bool:
        """Sleep as `Doorbell.sleep` does, unless somebody has asked; errands are done meanwhile."""
        try:
            try:
                self._turn.release()
                rung = self._asked or self._doorbell.sleep(seconds)
            finally:
                self._turn.acquire()
        except BaseException:  # of a signal's handler: the rank ends, and MPI soon
            self.errands.clear()
            raise
        self._asked = False
        if self._error is not None:
            raise self._error
        return rung
