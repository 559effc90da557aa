"""A rank's one event loop: it owns MPI, and sleeps when there is nothing to do."""

from __future__ import annotations

import time
from collections.abc import Callable

from mpillm.comms.doorbell import Doorbell
from mpillm.comms.watch import Watch

# A look may only fetch, inside MPI, what the next one returns: Open MPI and MPICH both do so.
_LOOKS = 2
# After a bell without a message: another thread inside MPI can keep a look from seeing it.
_LOOKS_AFTER_BELL = 8
_FIRST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 600e-6  # where this rank must poll: bounds the latency that it adds between two messages
_IDLE_SLEEP_S = 1200e-6  # after _IDLE_LOOKS without work; `bench routing` measures a look's CPU time
_IDLE_LOOKS = 256


class EventLoop:
    """Calls every poller in turn; a poller never waits, and returns whether it found work."""

    def __init__(self, watch: Watch, doorbell: Doorbell) -> None:
        self._watch = watch
        self._doorbell = doorbell
        self.pollers: list[Callable[[], bool]] = []
        self.quiet_s: list[Callable[[], float]] = []
        """Each says for how long its poller will find nothing unless somebody rings this rank's bell."""

    def run_until(self, done: Callable[[], bool]) -> None:
        """Poll until `done()`. Pollers raise errors; rank 0's control and the watch enforce deadlines."""
        pause, idle, rang = _FIRST_SLEEP_S, 0, False
        watch, doorbell = self._watch, self._doorbell
        while not done():
            worked = False
            for poll in self.pollers:
                if poll():
                    worked = True
            watch.tick()
            if worked:
                pause, idle, rang = _FIRST_SLEEP_S, 0, False
                continue
            idle += 1
            if idle < _LOOKS and doorbell.heard and not rang:
                continue
            quiet_s = min(quiet_s() for quiet_s in self.quiet_s) if doorbell.heard else 0.0
            if quiet_s <= 0 or (rang and idle < _LOOKS_AFTER_BELL):
                time.sleep(pause)
                pause = min(pause * 1.5, _LONGEST_SLEEP_S) if idle < _IDLE_LOOKS else _IDLE_SLEEP_S
            elif idle > _LOOKS:
                rang = doorbell.sleep(quiet_s)
                pause, idle = _FIRST_SLEEP_S, 0
