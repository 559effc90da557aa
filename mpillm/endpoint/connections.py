"""The connections to an HTTP port: their limit, and which one is closed for a new one.

A process that has reached its limit of open files cannot write `result.json` or a log, nor check the other
ranks. Therefore connections may use only a part of the files. If this part is used up, a new connection
closes an idle one: from the address with the most idle connections, the one that has waited longest for a
complete request. A request is complete when its key and its body have arrived.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import _ErrInfo

from launch.safe_text import one_line
from mpillm.endpoint.api_error import ApiError
from mpillm.endpoint.http_errors import error_response

_MAX_FILES = 1 << 16
_NETWORK_BYTES = 8  # the network's part of an IPv6 address
_SPARE, _SPARE_PART = 192, 8  # files for other uses: at least 192, and at least an eighth of all files


def raise_limit() -> int:
    """Raise this process's limit of open files; return how many may be clients' connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        max_files = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
        soft = max(soft, max_files)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return n_connections(_MAX_FILES if soft == resource.RLIM_INFINITY else min(soft, _MAX_FILES))


def n_connections(files: int) -> int:
    """Return how many of a process's files may be clients' connections."""
    return max(files - max(_SPARE, files // _SPARE_PART), files // 4)


class Connections:
    """The connections of one port. Used in its event loop's thread."""

    def __init__(self, max_connections: int, first_s: float = 30.0) -> None:
        """`first_s`: time from a new connection to the end of its first request's head."""
        self.first_s = first_s
        self._max_connections = max_connections
        self._all: set[Connection] = set()
        # Connections that wait for a complete request, by address; the oldest first.
        self._waiting: dict[str, dict[Connection, None]] = {}

    def add(self, one: Connection) -> bool:
        """Add a connection. At the limit, close an idle one first; return False if none is idle."""
        if len(self._all) >= self._max_connections:
            if not self._waiting:
                return False
            crowd = max(self._waiting, key=lambda address: len(self._waiting[address]))
            oldest = next(iter(self._waiting[crowd]))
            self.remove(oldest)
            oldest.abort()
        self._all.add(one)
        self._wait(one)
        return True

    def work(self, one: Connection, on: bool) -> None:
        """Mark the request of connection `one` as complete (`on`), or as answered."""
        if one in self._all:  # otherwise `one` was closed in the meantime
            self._wait_no_more(one)
            if not on:
                self._wait(one)

    def remove(self, one: Connection) -> None:
        self._all.discard(one)
        self._wait_no_more(one)

    def _wait(self, one: Connection) -> None:
        self._waiting.setdefault(one.address, {})[one] = None

    def _wait_no_more(self, one: Connection) -> None:
        if (waiting := self._waiting.get(one.address)) is not None:
            waiting.pop(one, None)
            if not waiting:
                del self._waiting[one.address]


class Connection(web.RequestHandler):
    """A connection counted by `Connections`."""

    __slots__ = ("_first", "_others", "address")

    def __init__(self, others: Connections, server: web.Server, **options: Any) -> None:
        super().__init__(server, **options)
        self._others = others
        self._first: asyncio.TimerHandle | None = None
        self.address = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.address = client_of(transport)
        if self._others.add(self):
            self._first = asyncio.get_running_loop().call_later(self._others.first_s, self.abort)
        else:
            self.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._upgraded:
            # The port has no other protocol (RFC 9110, 7.8): only the request is read and answered.
            self._message_tail = b""
            self.close()
        request = self._current_request
        if not self._messages or request is None or request.content.is_eof():
            return
        # aiohttp would report an invalid body only after the request, which waits for the end of the body.
        wrong, _ = self._messages[-1]
        if isinstance(wrong, _ErrInfo):
            self._messages.pop()
            self.close()
            request.content.set_exception(
                ApiError(400, f"the body is broken: {wrong.message.partition(chr(10))[0]}")
            )
            request.content.feed_eof()  # nothing more follows

    def connection_lost(self, exc: BaseException | None) -> None:
        self.note_head()
        self._others.remove(self)
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Log an error that occurred before a route was reached. Answer in one line, without request data."""
        super().handle_error(request, status, exc, message)
        text = (
            "internal error"
            if status == 500 or not message
            else one_line(message.partition("\n")[0]).rstrip(":")
        )
        response = error_response(ApiError(status, text))
        response.force_close()
        return response

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def note_head(self) -> None:
        """Stop the timer for the head of the first request."""
        if self._first is not None:
            self._first.cancel()
            self._first = None

    def note_working(self, on: bool) -> None:
        """Mark this connection's request as complete (`on`), or as answered."""
        self._others.work(self, on)


def client_of(transport: asyncio.BaseTransport) -> str:
    """Return the client's address; for IPv6 its network, because a client may have all its addresses."""
    peer = transport.get_extra_info("peername")
    host = str(peer[0]) if peer else ""
    if ":" not in host or host.startswith("::ffff:"):
        return host
    return socket.inet_pton(socket.AF_INET6, host.partition("%")[0])[:_NETWORK_BYTES].hex()


def address_of(request: web.Request) -> str:
    """Return the address of a request's client (see `client_of`)."""
    connection = request.protocol
    return connection.address if isinstance(connection, Connection) else ""


def note_head(request: web.Request) -> None:
    """Record that the head of a request has arrived."""
    if isinstance(connection := request.protocol, Connection):
        connection.note_head()


def note_working(request: web.Request, on: bool) -> None:
    """Mark a request as complete (`on`), or as answered."""
    if isinstance(connection := request.protocol, Connection):
        connection.note_working(on)
