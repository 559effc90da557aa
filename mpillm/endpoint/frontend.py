"""The MPI side of the endpoint: passes requests to the leader, and responses to the HTTP thread.

The two threads share one deque and one callback. Whole messages go through them: no Python runs per token.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mpillm.comms.messages import (
    ANSWER,
    CANCEL,
    QUERY,
    RESET_CACHE,
    RESPONSE,
    WINDOW,
    Batch,
    ResponseFlag,
    concat,
)
from mpillm.errors import Failure, RunError
from mpillm.phases import Phase
from mpillm.roles.role import Role

if TYPE_CHECKING:  # its import starts MPI
    from mpillm.comms.transport import Transport

_MAX_BATCH = 1024  # requests in one message
_CANCELLED = int(ResponseFlag.FIRST | ResponseFlag.FINAL | ResponseFlag.CANCELLED | ResponseFlag.CANCEL_DONE)


class HttpServerHandle(Protocol):
    """The HTTP server, as the main thread uses it."""

    def listen(self) -> None:
        """Accept connections from now on. Returns immediately."""

    @property
    def listening(self) -> bool:
        """Whether connections are accepted."""

    def drain(self, seconds: float) -> None:
        """Accept no more requests, and cancel the open ones after `seconds`. Returns immediately."""

    @property
    def drained(self) -> bool:
        """Whether `drain` is done: every request has ended, also in the instances."""

    @property
    def error(self) -> str:
        """The error that ended the HTTP thread; empty while it runs."""

    def stop(self) -> None:
        """Close every connection and end the thread."""


class Mailbox:
    """Messages between the threads: a request is a batch of one row, a cancellation is an id.

    None lets the instances empty their prefix caches before later requests.
    """

    def __init__(self) -> None:
        self.out: deque[Batch | int | None] = deque()  # from the HTTP thread
        self.wake: Callable[[], None] = lambda: None  # wakes the main thread; any thread may call it
        # Passes responses to the HTTP thread; called in the main thread.
        self.deliver: Callable[[Batch], None] = lambda batch: None

    def put(self, item: Batch | int | None) -> None:
        """Add a message. Called in the HTTP thread."""
        self.out.append(item)
        self.wake()


class Frontend(Role):
    """Role that replaces the harness in a run that serves."""

    sends_requests = True

    def __init__(
        self, route: Transport, leader: int, mailbox: Mailbox, endpoint: HttpServerHandle, drain_s: float
    ) -> None:
        """`leader`: the leader's rank; `drain_s`: time for open requests after a drain has started."""
        self._route = route
        self._leader = leader
        self._mailbox = mailbox
        self._endpoint = endpoint
        self._drain_s = drain_s
        self._window = 0
        self._pending: deque[Batch] = deque()  # requests for which the leader has no credits yet
        self._drain_requested = False
        self._draining = False
        self.started = 0.0  # time.perf_counter() at the start of the test; 0: not yet
        ANSWER.handle(route, lambda source, batch: mailbox.deliver(batch))
        WINDOW.handle(route, self._on_window)

    def end_early(self) -> bool:
        """Request a drain of the test; return False if a drain was requested before.

        For signal handlers: `poll` does the work.
        """
        first = not self._drain_requested
        self._drain_requested = True
        return first

    def ready(self) -> None:
        self._endpoint.listen()  # the console names the URL when this phase ends; requests wait for the test

    def test(self) -> None:
        self.started = time.perf_counter()

    def done(self, phase: Phase) -> bool:
        if error := self._endpoint.error:
            raise RunError(Failure(f"the HTTP server failed: {error}"))
        if phase == "ready":
            return self._window > 0 and self._endpoint.listening
        return phase != "test" or self._endpoint.drained

    def stop(self) -> None:
        self._endpoint.stop()

    def poll(self) -> bool:
        if self._drain_requested and not self._draining:
            self._draining = True
            self._endpoint.drain(self._drain_s)
        out, cancelled = self._mailbox.out, list[int]()
        while out:
            item = out.popleft()
            if item is None:  # earlier requests may follow this message, but later ones do
                RESET_CACHE.send(self._route, self._leader, None)
            elif isinstance(item, int):
                cancelled.append(item)
            else:
                self._pending.append(item)
        worked = bool(cancelled)
        while self.started and self._pending and self._window > 0:
            n = min(len(self._pending), self._window, _MAX_BATCH)
            QUERY.send(self._route, self._leader, concat([self._pending.popleft() for _ in range(n)]))
            self._window -= n
            worked = True
        if cancelled:  # sent after the requests that they cancel
            self._cancel(cancelled)
        return worked

    def _cancel(self, ids: list[int]) -> None:
        unsent = {int(batch.rows["id"][0]) for batch in self._pending}.intersection(ids)
        if unsent:
            self._pending = deque(batch for batch in self._pending if int(batch.rows["id"][0]) not in unsent)
            rows = np.array([(id_, 0, _CANCELLED) for id_ in unsent], RESPONSE)
            self._mailbox.deliver(Batch(rows, np.zeros(0, np.int32)))
        if sent := [id_ for id_ in ids if id_ not in unsent]:
            CANCEL.send(self._route, self._leader, sent)

    def _on_window(self, source: int, requests: int) -> None:
        self._window += requests
