"""Event loop of a thread with sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_CANCEL_S = 2.0  # time for the remaining tasks to end


def new_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop: uvloop's if installed, because it is faster than asyncio's."""
    try:
        import uvloop
    except ModuleNotFoundError:  # some machines have no wheel of uvloop
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def close_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel the tasks of a loop that has stopped, wait until they end, and close the loop."""
    if left := asyncio.all_tasks(loop):
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.wait(left, timeout=_CANCEL_S))
    loop.close()


def run_alone(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine on a new event loop, and close the loop."""
    loop = new_loop()
    try:
        return loop.run_until_complete(work)
    finally:
        close_loop(loop)
