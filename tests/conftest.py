"""For all tests."""

from __future__ import annotations

import signal

# Under nohup, what tests start would inherit that SIGHUP is ignored, and rightly go on when one comes. Handlers are not inherited.
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)
