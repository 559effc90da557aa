"""A rank's one event loop: it owns MPI, and sleeps when there is nothing to do."""

from __future__ import annotations

import time
from collections.abc import Callable

from mpillm.comms.watch import Watch

_FIRST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 600e-6  # bounds the latency that a rank adds between two messages
_IDLE_SLEEP_S = 1200e-6  # after _IDLE_LOOKS without work; `bench routing` measures a look's CPU time
_IDLE_LOOKS = 256


class EventLoop:
    """Calls every poller in turn; a poller never waits, and returns whether it found work."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.pollers: list[Callable[[], bool]] = []

    def run_until(self, done: Callable[[], bool]) -> None:
        """Poll until `done()`. Pollers raise errors; rank 0's control and the watch enforce deadlines."""
        pause, idle = _FIRST_SLEEP_S, 0
        watch = self._watch
        while not done():
            worked = False
            for poll in self.pollers:
                if poll():
                    worked = True
            watch.tick()
            if worked:
                pause, idle = _FIRST_SLEEP_S, 0
            else:
                time.sleep(pause)
                idle += 1
                pause = min(pause * 1.5, _LONGEST_SLEEP_S) if idle < _IDLE_LOOKS else _IDLE_SLEEP_S
