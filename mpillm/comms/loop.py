"""A rank's one event loop: it owns MPI, and sleeps when there is nothing to do."""

from __future__ import annotations

from collections.abc import Callable

from mpillm.comms.doorbell import Doorbell
from mpillm.comms.watch import Watch

# A look may only fetch, inside MPI, what the next one returns: Open MPI and MPICH both do so.
_LOOKS = 2
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
        pause, idle = _FIRST_SLEEP_S, 0
        watch, doorbell = self._watch, self._doorbell
        while not done():
            worked = False
            for poll in self.pollers:
                if poll():
                    worked = True
            watch.tick()
            idle = 0 if worked else idle + 1
            if idle < _LOOKS:
                continue
            quiet_s = min(quiet_s() for quiet_s in self.quiet_s) if doorbell.heard else 0.0
            if doorbell.sleep(quiet_s if quiet_s > 0 else pause) or quiet_s > 0:
                pause, idle = _FIRST_SLEEP_S, 0
            else:
                pause = min(pause * 1.5, _LONGEST_SLEEP_S) if idle < _IDLE_LOOKS else _IDLE_SLEEP_S
