"""Signals that ask a rank to stop, and their echoes."""

from __future__ import annotations

import signal

import pytest

from launch.signals import Echoes
from mpillm.commands.run import Interrupts
from mpillm.errors import InterruptError


class Clock:
    """The time, in seconds, which stands still."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_slurm_signals_twice_at_the_time_limit() -> None:
    """The second SIGTERM would end a rank while it reports the first."""
    interrupt = Interrupts(lambda: False, Echoes(clock := Clock()))
    with pytest.raises(InterruptError, match="SIGTERM"):
        interrupt(signal.SIGTERM, None)
    clock.now += 0.01
    interrupt(signal.SIGTERM, None)
    with pytest.raises(InterruptError, match="Ctrl-C"):  # a person's wish is never an echo
        interrupt(signal.SIGINT, None)
    clock.now += 1
    with pytest.raises(InterruptError, match="SIGTERM"):
        interrupt(signal.SIGTERM, None)


def test_an_echo_does_not_cut_a_servers_orderly_end_short() -> None:
    answers = [True, False]
    interrupt = Interrupts(lambda: answers.pop(0), Echoes(clock := Clock()))
    interrupt(signal.SIGTERM, None)
    clock.now += 0.01
    interrupt(signal.SIGTERM, None)
    clock.now += 1
    with pytest.raises(InterruptError):
        interrupt(signal.SIGTERM, None)
