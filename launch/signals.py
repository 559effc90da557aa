"""Signals that request a program's end."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Mapping

from launch.launcher import HYDRA, find_launcher

_ECHO_S = 0.5


class StopSignal(SystemExit):
    """Ctrl-C, or another signal that stops this process. If not caught, the exit code is 128 + signal."""

    def __init__(self, number: int, is_reported: bool = False) -> None:
        """`is_reported`: a child that writes to the same output also gets the signal, and reports it."""
        super().__init__(128 + number)
        self.number = number
        self.is_reported = is_reported
        self.during = ""  # the work that was interrupted

    def message(self) -> str:
        """Return the line that names the signal and the interrupted work."""
        return f"interrupted ({title(self.number)})" + (f" during {self.during}" if self.during else "")


class Echoes:
    """Filter of repeated signals of a batch system.

    At a job's time limit, Slurm sends its processes SIGTERM twice within 10 ms: directly, and through srun.
    At a warning signal (``sbatch --signal=USR1@60``), a rank gets SIGUSR1 from Slurm, and SIGUSR2 from an
    `mpillm mpirun` that got SIGUSR1. The second signal must not interrupt the shutdown by the first.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._last = clock, -math.inf

    def has(self, number: int) -> bool:
        """Return whether a received signal repeats one that came just before. Signal handlers call this."""
        if number == signal.SIGINT:  # a second Ctrl-C is a second request
            return False
        now = self._clock()
        if now < self._last + _ECHO_S:
            return True
        self._last = now
        return False


def stop_signals(env: Mapping[str, str] = os.environ) -> list[signal.Signals]:
    """Return the signals by which a user, a closing terminal or a batch system ends a program.

    Batch systems send SIGUSR1 or SIGUSR2 before a job's time limit, and `mpillm mpirun` sends SIGUSR2 through
    Open MPI's mpirun, which leaves ranks no time after SIGINT or SIGTERM. Hydra sends its ranks SIGUSR1 when
    one of them is lost, so they do not stop at SIGUSR1; `launch.guard` passes on that of a batch system.
    Under nohup, SIGHUP is missing.
    """
    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2]
    launcher = find_launcher(env)
    if launcher is None or launcher.name != HYDRA:
        signals.append(signal.SIGUSR1)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    return signals


def title(number: int) -> str:
    """Return a signal's name for users."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
