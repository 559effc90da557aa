"""The connections to an HTTP port: how many there may be, and which one makes room when there are too many.

A process that has no open file left can't write `result.json` or a log, nor look at the other ranks. So
connections take no more than a part of them. Beyond that the one that has waited longest for a whole request
is closed. A request is whole when its key and its body are there.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from aiohttp import web

from launch.outside import one_line
from mpillm.endpoint.api_error import ApiError
from mpillm.endpoint.http_errors import error_response

_MOST = 1 << 16
_SPARE, _SPARE_PART = 192, 8  # files that are no connections of clients: so many, and this part of all


def raise_limit() -> int:
    """Let this process open as many files as it may; return how many of them may be clients' connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
        soft = max(soft, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    files = _MOST if soft == resource.RLIM_INFINITY else min(soft, _MOST)
    return max(files - max(_SPARE, files // _SPARE_PART), files // 4)


class Connections:
    """Those of one port. Used in its event loop's thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: dict[Connection, None] = {}  # for a whole request, the one that has longest first
        self._working: set[Connection] = set()

    def add(self, one: Connection) -> bool:
        """Take a new one, and close another if there are too many; return False if all of them work."""
        if len(self._waiting) + len(self._working) >= self._most:
            if not self._waiting:
                return False
            self.remove(oldest := next(iter(self._waiting)))
            oldest.abort()
        self._waiting[one] = None
        return True

    def work(self, one: Connection, on: bool) -> None:
        """Note that its request is whole, or answered."""
        if one in self._waiting or one in self._working:  # else it was closed in the meantime
            self.remove(one)
            if on:
                self._working.add(one)
            else:
                self._waiting[one] = None

    def remove(self, one: Connection) -> None:
        self._waiting.pop(one, None)
        self._working.discard(one)


class Connection(web.RequestHandler):
    """A connection that its `Connections` know of."""

    __slots__ = ("_others",)

    def __init__(self, others: Connections, server: web.Server, **options: Any) -> None:
        super().__init__(server, **options)
        self._others = others

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if not self._others.add(self):
            self.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._others.remove(self)
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Log an error before a route was reached, and answer it: in a line, without all that was sent."""
        super().handle_error(request, status, exc, message)
        said = (
            "internal error"
            if status == 500 or not message
            else one_line(message.partition("\n")[0]).rstrip(":")
        )
        response = error_response(ApiError(status, said))
        response.force_close()
        return response

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def note_whole(self, on: bool) -> None:
        """Note that its request is whole, or answered."""
        self._others.work(self, on)


def note_whole(request: web.Request, on: bool) -> None:
    """Note that a request is whole, or (`on` is False) answered."""
    if isinstance(connection := request.protocol, Connection):
        connection.note_whole(on)
