"""Signals that ask a rank to stop, and their echoes."""

from __future__ import annotations

import signal
import time

import pytest

from mpillm.commands.run import Interrupts
from mpillm.errors import InterruptError


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time, in seconds, which stands still."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_slurm_signals_twice_at_the_time_limit(clock: list[float]) -> None:
    """The second SIGTERM would end a rank while it reports the first."""
    interrupt = Interrupts(lambda: False)
    with pytest.raises(InterruptError, match="SIGTERM"):
        interrupt(signal.SIGTERM, None)
    clock[0] += 0.01
    interrupt(signal.SIGTERM, None)
    with pytest.raises(InterruptError, match="Ctrl-C"):  # a person's wish is never an echo
        interrupt(signal.SIGINT, None)
    clock[0] += 1
    with pytest.raises(InterruptError, match="SIGTERM"):
        interrupt(signal.SIGTERM, None)


def test_an_echo_does_not_cut_a_servers_orderly_end_short(clock: list[float]) -> None:
    answers = [True, False]
    interrupt = Interrupts(lambda: answers.pop(0))
    interrupt(signal.SIGTERM, None)
    clock[0] += 0.01
    interrupt(signal.SIGTERM, None)
    clock[0] += 1
    with pytest.raises(InterruptError):
        interrupt(signal.SIGTERM, None)
