"""The signals that ask a program to end."""

from __future__ import annotations

import math
import os
import signal
import time

from launch.environment import EXIT_FILE

_ECHO_S = 0.5


class Echoes:
    """Tells a SIGTERM from its echo.

    When a job reaches its time limit, Slurm sends its processes SIGTERM twice within 10 ms: once itself, once
    through srun. The second one is no second wish, and must not cut short what the first one began.
    """

    def __init__(self) -> None:
        self._last = -math.inf

    def has(self, number: int) -> bool:
        """Return whether a signal that has come repeats one that came just before. Handlers call this."""
        if number != signal.SIGTERM:
            return False
        now = time.monotonic()
        if now < self._last + _ECHO_S:
            return True
        self._last = now
        return False


def stop_signals() -> list[signal.Signals]:
    """Return what a user, a closing terminal, or a batch system sends; without SIGHUP under nohup.

    And SIGUSR2 to what `mpillm mpirun` has started: by that it passes them on through Open MPI's mpirun.
    """
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    return signals + [signal.SIGUSR2] * (EXIT_FILE in os.environ)


def title(number: int) -> str:
    """Return a signal as users know it."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
