"""An event loop in its own thread, for a rank whose main thread must not wait."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from launch.event_loop import close_loop, new_loop

T = TypeVar("T")

_log = logging.getLogger(__name__)
_END_S = 5.0
_LOOK_S = 0.25


class ClientThread:
    """Runs coroutines and functions on its loop. `error`: an uncaught exception there, which is a bug."""

    def __init__(
        self,
        name: str,
        failed: Callable[[], None] = lambda: None,
        uncaught: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None = None,
    ) -> None:
        """`failed` is called on the thread when there is an `error`.

        `uncaught` handles exceptions of connections' callbacks, which then do not count as errors.
        """
        self._failed = failed
        self._users = 1
        self.error: BaseException | None = None
        self.loop = new_loop()
        self.loop.set_exception_handler(uncaught or self._uncaught)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        except BaseException as error:  # noqa: BLE001 - the readers of `error` raise it
            self._uncaught(self.loop, {"exception": error})

    def _uncaught(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.error = self.error or context.get("exception") or RuntimeError(context["message"])
        self._failed()

    def run(
        self, work: Coroutine[Any, Any, T], timeout_s: float, poll: Callable[[], None] = lambda: None
    ) -> T:
        """Return the result of `work`, or raise its exception. Raises TimeoutError after `timeout_s`.

        `poll` is called periodically meanwhile. An exception of `poll` also ends the work.
        """
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        end = time.monotonic() + timeout_s
        try:
            while not future.done() and (left := end - time.monotonic()) > 0:
                concurrent.futures.wait([future], min(left, _LOOK_S))
                poll()
            if future.done():
                return future.result()
        finally:
            future.cancel()
        raise TimeoutError(f"not done within {timeout_s:g} s")

    def post(self, function: Callable[..., object], *arguments: object) -> None:
        """Call `function` on the loop, soon. Its exception becomes the thread's `error`."""
        if threading.get_ident() == self._thread.ident:
            self.loop.call_soon(self._do, function, *arguments)
        else:
            self.loop.call_soon_threadsafe(self._do, function, *arguments)

    def _do(self, function: Callable[..., object], *arguments: object) -> None:
        try:
            function(*arguments)
        except Exception as error:  # noqa: BLE001 - as in `_run`
            self._uncaught(self.loop, {"exception": error})

    def shared(self) -> ClientThread:
        """Return this thread for one more user. The thread ends when all users have stopped it."""
        self._users += 1
        return self

    @property
    def runs(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    def cpu_s(self) -> float:
        """Return the CPU time that the thread has used."""
        assert self._thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def stop(self) -> None:
        """End the loop and the thread, unless others use it."""
        self._users -= 1
        if self._users:
            return
        self.post(self.loop.stop)
        self._thread.join(_END_S)
        if self._thread.is_alive():
            _log.warning("thread %s has not ended within %g s", self._thread.name, _END_S)
        else:
            close_loop(self.loop)
