"""The signals that ask a program to end."""

from __future__ import annotations

import os
import signal

from launch.environment import EXIT_FILE


def stop_signals() -> list[signal.Signals]:
    """Return what a user, a closing terminal, or a batch system sends; without SIGHUP under nohup.

    And SIGUSR2 to what `mpillm mpirun` has started: by that it passes them on through Open MPI's mpirun.
    """
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    return signals + [signal.SIGUSR2] * (EXIT_FILE in os.environ)


def title(number: int) -> str:
    """Return a signal as a person knows it."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
