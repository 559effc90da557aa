"""One server: its address, its connections, and its state."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from disagg.errors import ConfigError
from launch.bounded_http import MAX_PAGE_BYTES
from launch.masking import holds_secret
from mpillm.comms.messages import Refusal
from mpillm.cores.openai_client.dialect import DIALECTS, PATHS, Dialect
from mpillm.cores.openai_client.http_connection import (
    HttpConnection,
    HttpError,
    NoAnswer,
    NothingSentBack,
    Receiver,
)
from mpillm.cores.openai_client.server_tally import Request, ServerTally
from mpillm.options.parsers import is_header_value

CONNECT_S = 10.0  # longest wait for a connection
_PORTS = {"http": 80, "https": 443}
API_KEY = "OPENAI_API_KEY"
"""The environment variable with the key for servers, also read by OpenAI's client."""
_KEY_VARIABLE = f"the environment variable {API_KEY}"


class EndpointError(Exception):
    """A server failed. The message names its address and the cause."""

    refusal: Refusal | None = None
    """The server's error, if it is about this request."""


class ServerUnreachable(EndpointError):
    """A server cannot be reached, or is silent: all its requests have failed."""


class UntrustedError(NothingSentBack):
    """This machine does not trust the server's certificate: retries are useless."""


class OutstandingRequest(Receiver, Protocol):
    """A request that was sent, without a complete response."""

    def sent(self, connection: HttpConnection, reused: bool, at: float) -> None:
        """Record the time of sending, `at` (time.perf_counter()); `reused`: the connection is not new."""


def _tls(insecure: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def api_key() -> str:
    """Return the key for servers; "" if there is none. Raises ConfigError if it cannot be in a header."""
    key = os.environ.get(API_KEY, "")
    if not is_header_value(key) or key != key.strip():  # the message does not have the key
        raise ConfigError(f"{API_KEY}: its value must be printable ASCII text without blanks around it")
    return key


class RemoteServer:
    """A server. Everything but the address belongs to the event loop's thread."""

    def __init__(
        self,
        url: str,
        strict_model: bool = False,
        headers: Mapping[str, str] | None = None,
        session_header: str = "X-Session-ID",
        *,
        request_path: str | None = None,
        insecure: bool = False,
    ) -> None:
        """`url`: host:port, or http(s)://host[:port][/path]. Raises ValueError for any other form, and
        ConfigError for a wrong key.

        `strict_model`: see `ServerTally`. `headers`: more of them, for each request. `session_header`: see
        `start`. `request_path`: in place of that of completions and chats. `insecure`: do not check the
        certificate.
        """
        # Error messages append a path that begins with /v1.
        self.url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        try:
            parts = urlsplit(self.url)
            self.host, self._port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
            self.host.encode("idna")  # as it is looked up
            self.url.encode("latin-1")  # as it is sent
        except (KeyError, ValueError):  # another scheme, an invalid port, or a name that DNS cannot have
            self.host = ""
        is_text = self.url.isprintable() and " " not in self.url
        if not (self.host and is_text) or "@" in parts.netloc or parts.query:
            raise ValueError(f"{url} is not host:port, or a URL of http or https without user and query")
        self._tls = _tls(insecure) if parts.scheme == "https" else None
        self._path, self._request_path = parts.path, request_path
        behind = parts.scheme in getproxies() and not proxy_bypass(self.host)
        self._past_proxy = " (the proxy of the environment is not used)" if behind else ""
        key = api_key()
        own_key = any(map(holds_secret, headers or {}))
        self.key_source = "--extra_headers" if own_key else _KEY_VARIABLE if key else ""
        """Where the sent key is from; "" if no key is sent."""
        more = {"Authorization": f"Bearer {key}"} if key else {}
        more |= headers or {}
        self._head = (
            f"Host: {parts.netloc}\r\n"
            + "".join(f"{name}: {value}\r\n" for name, value in more.items())
            + "Content-Type: application/json\r\nContent-Length: "
        )
        self._session_header = session_header.encode("latin-1")
        self._posts = {path: self._start_line("POST", path) for path in PATHS.values()}
        self.bootstrap_port = 0  # of SGLang's context server: see `BootstrapProtocol`
        self.model = ""
        self.dialect: Dialect = DIALECTS[0]
        self.last_statistics: Any = None  # see `server_counts`
        self.tally = ServerTally(strict_model)
        self.calls: set[OutstandingRequest] = set()  # outstanding
        self.last_received = 0.0  # time of the last data, or of the first request after a pause
        self.answered = 0.0  # time when the newest answered request was sent
        self.connections = 0  # opened so far
        self._idle: list[HttpConnection] = []
        self._used: set[HttpConnection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        # The task that sends a call. A call that is released, and then started again, has another one.
        self._senders: dict[OutstandingRequest, asyncio.Task[None]] = {}

    def _start_line(self, method: str, path: str) -> bytes:
        return f"{method} {self._path}{self.path_of(path)} HTTP/1.1\r\n{self._head}".encode("latin-1")

    def path_of(self, path: str) -> str:
        """Return the path of requests that OpenAI's API has at `path`."""
        return self._request_path or path if path in PATHS.values() else path

    # --- calls ---

    def start(self, call: OutstandingRequest, body: bytes, session: int = 0) -> None:
        """Send the request of `call`, over a free connection or a new one.

        `session`: of the session header, by which routers keep a conversation at one server; 0: none.
        """
        if not self.calls:
            self.last_received = time.perf_counter()
        self.calls.add(call)
        header = b"%b: %08x\r\n" % (self._session_header, session) if session else b""
        request = b"%b%d\r\n%b\r\n%b" % (self._posts[self.dialect.path], len(body), header, body)
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                self._send(connection, call, request, reused=True)
                return
        task = asyncio.get_running_loop().create_task(self._connect_for(call, request))
        self._senders[call] = task
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect_for(self, call: OutstandingRequest, request: bytes) -> None:
        task = asyncio.current_task()
        try:
            connection = await self._connect()
        except NothingSentBack as error:
            if self._senders.get(call) is task:
                call.on_broken(error)
            return
        if self._senders.get(call) is task:
            del self._senders[call]
            self._send(connection, call, request, reused=False)
        else:  # released while connecting
            self._idle.append(connection)

    def _send(
        self, connection: HttpConnection, call: OutstandingRequest, request: bytes, reused: bool
    ) -> None:
        self._used.add(connection)
        call.sent(connection, reused, time.perf_counter())
        connection.send(request, call)

    def count(self, request: Request, n_tokens: int | None) -> None:
        """Add an answer to the tally: see `ServerTally.add`."""
        self.tally.add(request, self.dialect, request.model or self.model, n_tokens)

    def release(self, call: OutstandingRequest, connection: HttpConnection | None, is_complete: bool) -> None:
        """End `call`, and reuse its connection if the response was complete; otherwise close it."""
        self.calls.discard(call)
        self._senders.pop(call, None)
        if connection is None:
            return
        self._used.discard(connection)
        if is_complete and connection.reusable and not connection.closed:
            self._idle.append(connection)
        elif not connection.closed:
            connection.close()

    async def _connect(self, limit_s: float = CONNECT_S) -> HttpConnection:
        loop = asyncio.get_running_loop()
        making = loop.create_connection(HttpConnection, self.host, self._port, ssl=self._tls)
        try:
            _, connection = await asyncio.wait_for(making, limit_s)
        except (asyncio.TimeoutError, TimeoutError):  # two classes in Python 3.10
            raise NothingSentBack(f"no connection within {limit_s:.3g} s{self._past_proxy}") from None
        except ssl.SSLCertVerificationError as error:
            raise UntrustedError(
                f"its certificate is not trusted: {error.verify_message}; the environment variable"
                " SSL_CERT_FILE may name a file of certificates to trust, or --insecure trusts any"
            ) from None
        except ssl.SSLError as error:  # its errno is not a system error
            raise NothingSentBack(f"TLS: {error.reason or error}") from None
        except OSError as error:
            known = error.errno is not None and error.errno > 0
            why = os.strerror(error.errno or 0) if known else str(error)
            raise NothingSentBack(f"{why}{self._past_proxy}") from None
        self.connections += 1
        return connection

    def close(self) -> None:
        """Close every connection, without reports about outstanding requests."""
        for task in self._connecting:
            task.cancel()
        for connection in (*self._idle, *self._used):
            connection.close()
        self._idle.clear()
        self._used.clear()

    # --- single requests ---

    async def fetch(
        self, method: str, path: str, timeout_s: float, body: bytes = b""
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Return the status, headers and body of the response to one request, over its own connection.

        Raises HttpError.
        """
        end = time.monotonic() + timeout_s
        connection = await self._connect(min(timeout_s, CONNECT_S))
        self._used.add(connection)
        reply = _Reply()
        try:
            start = self._start_line(method, path)
            connection.send(b"%b%d\r\n\r\n%b" % (start, len(body), body), reply)
            await asyncio.wait_for(reply.ended, max(0.0, end - time.monotonic()))
        except (asyncio.TimeoutError, TimeoutError):
            request = f"{method} {self.path_of(path)}"
            raise NoAnswer(f"no answer to {request} within {round(timeout_s, 2):g} s") from None
        finally:
            self._used.discard(connection)
            connection.close()
        return reply.status, reply.headers, b"".join(reply.body)


class _Reply(Receiver):
    """A complete response."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.body: list[bytes] = []
        self._left = MAX_PAGE_BYTES
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        self.status, self.headers = status, headers

    def on_body(self, data: bytes, at: float) -> None:
        self._left -= len(data)
        if self._left < 0:
            raise HttpError(f"its answer is longer than {MAX_PAGE_BYTES} bytes")
        self.body.append(data)

    def on_end(self, connection: HttpConnection) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def on_broken(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)
