"""The one event loop of a rank: it owns MPI, and sleeps when there is nothing to do."""

from __future__ import annotations

import time
from collections.abc import Callable

from mpillm.comms.watch import Watch

_FIRST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 600e-6  # bounds the latency that a rank between two messages adds
_IDLE_SLEEP_S = 1200e-6  # of one that has had nothing to do for _IDLE_LOOKS; see `bench routing` for what each look costs in CPU
_IDLE_LOOKS = 256


class EventLoop:
    """Calls every poller in turn; a poller returns whether it found work, and never waits."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.pollers: list[Callable[[], bool]] = []

    def run_until(self, done: Callable[[], bool]) -> None:
        """Poll until `done()`; errors come out of the pollers, deadlines from rank 0's control and the watch."""
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
