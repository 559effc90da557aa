"""The event loop of a thread that has sockets, and how threads take turns."""

from __future__ import annotations

import asyncio
import sys

_SWITCH_INTERVAL_S = 0.0002


def new_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop: uvloop's if it is installed, which does the same in less time."""
    try:
        import uvloop
    except ModuleNotFoundError:  # there is no wheel for every machine
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def take_turns() -> None:
    """Let threads of this process wait for each other's Python for less long than its 5 ms.

    Those would dominate a latency: LoadGen's and the HTTP thread wait while a rank's event loop runs, and it
    waits for them.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
