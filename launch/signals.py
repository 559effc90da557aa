"""The signals that ask a program to end."""

from __future__ import annotations

import signal


def stop_signals() -> list[signal.Signals]:
    """What a person, a terminal that closes, or a batch system sends; without a SIGHUP that nohup has this process ignore."""
    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    return signals if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else signals[:2]
