"""The connections to an HTTP port: how many there may be, and which one makes room when there are too many.

A process that has no open file left can't write `result.json` or a log, nor look at the other ranks. So
connections take no more than a part of them. Beyond that one that waits for a whole request is closed: of the
address that has most of these, the one that has waited longest. A request is whole when its key and its body
are there.
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

_MOST = 1 << 16
_NETWORK_BYTES = 8  # of an IPv6 address
FIRST_S = 30.0
"""How long a client may take from connecting to the end of its first request's head."""
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
        self._all: set[Connection] = set()
        # Those that wait for a whole request, by their address; the one that has longest first.
        self._waiting: dict[str, dict[Connection, None]] = {}

    def add(self, one: Connection) -> bool:
        """Take a new one, and close another if there are too many; return False if all of them work."""
        if len(self._all) >= self._most:
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
        """Note that its request is whole, or answered."""
        if one in self._all:  # else it was closed in the meantime
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
    """A connection that its `Connections` know of."""

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
            self._first = asyncio.get_running_loop().call_later(FIRST_S, self.abort)
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
        # aiohttp tells what is wrong with a body only after its request, which waits for the rest of it.
        wrong, _ = self._messages[-1]
        if isinstance(wrong, _ErrInfo):
            self._messages.pop()
            self.close()
            request.content.set_exception(
                ApiError(400, f"the body is broken: {wrong.message.partition(chr(10))[0]}")
            )
            request.content.feed_eof()  # there is no rest to wait for

    def connection_lost(self, exc: BaseException | None) -> None:
        self.note_begun()
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

    def note_begun(self) -> None:
        """Note that there is a request."""
        if self._first is not None:
            self._first.cancel()
            self._first = None

    def note_whole(self, on: bool) -> None:
        """Note that its request is whole, or answered."""
        self._others.work(self, on)


def client_of(transport: asyncio.BaseTransport) -> str:
    """Return the address of who is connected; of IPv6 the network, of which one may have all addresses."""
    peer = transport.get_extra_info("peername")
    host = str(peer[0]) if peer else ""
    if ":" not in host or host.startswith("::ffff:"):
        return host
    return socket.inet_pton(socket.AF_INET6, host.partition("%")[0])[:_NETWORK_BYTES].hex()


def address_of(request: web.Request) -> str:
    """Return the address of a request's client (see `client_of`)."""
    connection = request.protocol
    return connection.address if isinstance(connection, Connection) else ""


def note_begun(request: web.Request) -> None:
    """Note that the head of a request is there."""
    if isinstance(connection := request.protocol, Connection):
        connection.note_begun()


def note_whole(request: web.Request, on: bool) -> None:
    """Note that a request is whole, or (`on` is False) answered."""
    if isinstance(connection := request.protocol, Connection):
        connection.note_whole(on)
