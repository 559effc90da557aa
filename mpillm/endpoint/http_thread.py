"""The HTTP thread: an event loop with the sockets, beside rank 0's main thread, which runs MPI."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import threading
import time
from functools import partial

from aiohttp import web

from disagg.errors import ConfigError
from mpillm.comms.messages import Batch
from mpillm.cores.openai_client.client_thread import ClientThread
from mpillm.endpoint.app import Service
from mpillm.endpoint.connections import Connection, Connections, raise_limit
from mpillm.endpoint.frontend import Mailbox
from mpillm.endpoint.http_errors import downgrade_http_errors
from mpillm.endpoint.open_requests import OpenRequests

_log = logging.getLogger(__name__)
_BACKLOG = 1024  # connections not accepted yet
_LOOK_S = 0.02  # time between checks whether the last request has ended
_CANCEL_S = 5.0  # for ranks to drop requests that `drain` cancels; the phase drain reports slower ranks
_STOP_S = 2.0
_UNREAD_S = 120  # after so many seconds, a client that does not read sent data is disconnected


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet. Raises ConfigError if the address is not available."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host}: {error}", about=["host"]) from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # The kernel then ends the connection of a client that reads nothing.
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # on Linux; accepted connections inherit it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _UNREAD_S)
        listener.bind(address)
    except OSError as error:
        listener.close()
        other = "host" if error.errno == errno.EADDRNOTAVAIL else "port"
        raise ConfigError(
            f"--host {host} --port {port}: {error.strerror}; name another {other}", about=["host", "port"]
        ) from error
    return listener


async def listen(
    app: web.Application, bound: socket.socket, connections: Connections | None = None, idle_s: float = 120.0
) -> tuple[web.AppRunner, asyncio.Server]:
    """Accept connections on a bound socket, until the returned server is closed.

    `connections`: by default, as many as the limit of open files allows. A connection may stay open for
    `idle_s` without a complete request. If a client disconnects, its handler is cancelled: this ends the
    request.
    """
    logging.getLogger("aiohttp.server").addFilter(downgrade_http_errors)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=_STOP_S)
    await runner.setup()
    assert runner.server is not None
    loop = asyncio.get_running_loop()
    connection = partial(
        Connection,
        connections or Connections(raise_limit()),
        runner.server,
        loop=loop,
        access_log=None,
        keepalive_timeout=idle_s,
        auto_decompress=False,
    )
    return runner, await loop.create_server(connection, sock=bound, backlog=_BACKLOG)


def url(bound: socket.socket) -> str:
    """Return the URL of the API behind a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


class HttpThread:
    """Implements `frontend.HttpServerHandle`.

    The main thread calls its methods; the HTTP thread does the work.
    """

    def __init__(
        self,
        service: Service,
        requests: OpenRequests,
        mailbox: Mailbox,
        bound: socket.socket,
        fetch_s: float = 5.0,
    ) -> None:
        """`fetch_s`: time for other servers to fetch KV caches whose clients already have their answers."""
        self._service = service
        self._requests = requests
        self._socket, self._fetch_s = bound, fetch_s
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._listening, self._drained = threading.Event(), threading.Event()
        self.error = ""
        mailbox.deliver = self._deliver
        self.thread = ClientThread("mpillm-http", self._on_end, self._on_loop_error)
        self._loop = self.thread.loop

    def listen(self) -> None:
        asyncio.run_coroutine_threadsafe(self._start(), self._loop)

    @property
    def listening(self) -> bool:
        return self._listening.is_set()

    def drain(self, seconds: float) -> None:
        asyncio.run_coroutine_threadsafe(self._drain(seconds), self._loop)

    @property
    def drained(self) -> bool:
        return self._drained.is_set()

    def stop(self) -> None:
        if self.thread.runs:
            try:
                self.thread.run(self._close(), _STOP_S)
            except TimeoutError as error:
                _log.warning("closing the connections: %s", error)
            self.thread.stop()
        self._socket.close()

    def _deliver(self, batch: Batch) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: no client waits for answers
            self.thread.post(self._requests.take, batch)

    # --- in the HTTP thread ---

    def _on_end(self) -> None:
        if self.thread.error is not None:
            self._fail(self.thread.error)

    def _fail(self, error: BaseException) -> None:
        _log.error("the HTTP thread", exc_info=error)
        self.error = self.error or f"{type(error).__name__}: {error}"

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """Log an error, usually of one connection: the others continue."""
        error = context.get("exception")
        _log.error("%s", context.get("message"), exc_info=error if isinstance(error, BaseException) else None)

    async def _start(self) -> None:
        try:
            self._runner, self._server = await listen(self._service.app(), self._socket)
            self._listening.set()
        except Exception as error:  # noqa: BLE001 - the main thread ends the run with this error
            self._fail(error)

    async def _drain(self, seconds: float) -> None:
        """Accept no connections and answer 503 on open ones, until all requests have ended or time is up."""
        guard = self._service.guard
        try:
            guard.drain()
            if self._server is not None:
                self._server.close()
            end = time.monotonic() + seconds
            while guard.active and time.monotonic() < end:
                await asyncio.sleep(_LOOK_S)
            await self._until_none_is_open(min(end, time.monotonic() + self._fetch_s))
            self._requests.give_up_all()
            await self._until_none_is_open(time.monotonic() + _CANCEL_S)
            self._drained.set()
        except Exception as error:  # noqa: BLE001 - as in `_start`
            self._fail(error)

    async def _until_none_is_open(self, end: float) -> None:
        while (len(self._requests) or self._service.guard.active) and time.monotonic() < end:
            await asyncio.sleep(_LOOK_S)

    async def _close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
