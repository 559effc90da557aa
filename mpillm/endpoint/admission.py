"""Admission of requests to a server's routes: the API key, and limits for bodies in memory."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable
from functools import lru_cache

from aiohttp import HttpVersion10, HttpVersion11, web

from mpillm.endpoint.api_error import ApiError
from mpillm.endpoint.connections import note_head, note_working
from mpillm.endpoint.http_errors import error_response
from mpillm.options.run_config import RunConfig

_log = logging.getLogger(__name__)
_CLIENT_CLOSED = 499  # nginx's status for a client that closed the connection
_VERSIONS = (HttpVersion10, HttpVersion11)
_BODIES = 16  # so many bodies of the largest size may be in memory
OPEN_PATHS = ("/health", "/metrics", "/version")
"""Paths that need no key, as in vLLM. All others reveal single requests, or cost computing time."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Body:
    """The body of a request while in use. As a context manager, it yields the bytes."""

    def __init__(self, guard: Guard, request: web.Request) -> None:
        self.n_bytes = 0  # so far
        self._guard = guard
        self._request = request

    def drop(self, error: ApiError) -> None:
        """Fail the reader of the body with `error`."""
        self._request.content.set_exception(error)

    async def __aenter__(self) -> bytes:
        try:
            data = await self._guard.read_body(self._request, self)
        except BaseException:
            self._guard.forget(self)
            raise
        note_working(self._request, True)
        return data

    async def __aexit__(self, *_: object) -> None:
        self._guard.forget(self)


class Guard:
    """Checks requests before their routes. Used in one event loop's thread."""

    def __init__(
        self,
        api_key: str | None = None,
        max_body_bytes: int = 1 << 24,
        host: str = "0.0.0.0",
        body_s: float = 120.0,
    ) -> None:
        """`host`: address at which the server listens. `body_s`: the time for a client to send a body."""
        self.max_body_bytes = max_body_bytes
        self._body_s = body_s
        self.draining = False
        self.active = 0  # handlers at work
        self._api_key = api_key.encode() if api_key else None
        self._is_local = is_loopback(host)
        self._arriving: set[_Body] = set()
        self._n_bytes = 0  # bytes of all bodies

    async def answered(self, handler: Handler, request: web.Request, name: str) -> web.StreamResponse:
        """Return a handler's response, with errors in OpenAI's form. `name`: the request's, for the log."""
        self.active += 1
        note_head(request)
        try:
            self._check(request)
            return await handler(request)
        except ApiError as error:
            return error_response(error)
        except web.HTTPRequestEntityTooLarge:
            message = f"the body is larger than {self.max_body_bytes} bytes"
            return error_response(ApiError(413, message, code="body_too_large"))
        except web.HTTPException as error:
            response = error_response(
                ApiError(error.status, f"{request.method} {request.path}: {error.reason}")
            )
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
            return response
        except RecursionError:
            return error_response(ApiError(400, "the body is nested too deep"))
        except ConnectionError:
            return web.Response(status=_CLIENT_CLOSED)  # no client reads it
        except Exception:  # noqa: BLE001 - the client gets an answer, and the log the traceback
            _log.exception("%s", name)
            return error_response(
                ApiError(500, f"internal error; the server's log has the traceback of {name}")
            )
        finally:
            self.active -= 1
            note_working(request, False)

    def _check(self, request: web.Request) -> None:
        """Check the API key. If the server has none, reject requests of web pages in a browser."""
        if request._version not in _VERSIONS:  # `version` is cached at its first use
            request._version = HttpVersion11  # otherwise the answer has the wrong version
            raise ApiError(505, "expected HTTP/1.1 or HTTP/1.0")
        if self._api_key is None:
            if "Origin" in request.headers:
                raise _no_page("a request with the header Origin")
            if self._is_local and not _names_this_machine(request.headers.get("Host", "")):
                raise _no_page(f"the name {request.headers['Host'][:60]!r}")
            return
        if request.path in OPEN_PATHS:
            return
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(
            key.strip().encode(errors="replace"), self._api_key
        ):
            raise ApiError(
                401,
                "the API key is missing or wrong: send 'Authorization: Bearer KEY'",
                code="invalid_api_key",
            )

    # --- bodies ---

    def body(self, request: web.Request) -> _Body:
        """Return a context manager for the body. Until the `with` block ends, its bytes count as in memory.

        Raises ApiError if the body is late, compressed or too long, or if there are too many bodies.
        """
        return _Body(self, request)

    async def read_body(self, request: web.Request, body: _Body) -> bytes:
        """Read a body. Only `_Body` calls this and `forget`."""
        if (coding := request.headers.get("Content-Encoding", "identity")) != "identity":
            # Decompression, to a thousand times the size, would delay all clients.
            raise ApiError(415, f"Content-Encoding {coding[:30]} is not supported: send the body as it is")
        if (request.content_length or 0) > self.max_body_bytes:
            raise web.HTTPRequestEntityTooLarge(self.max_body_bytes)
        if request.content.is_eof():  # it arrived with the headers, the usual case
            data = await request.read()
            self._count(body, len(data))
            return data
        self._arriving.add(body)
        late = ApiError(408, f"the body did not arrive within {self._body_s:g} s", code="body_too_slow")
        timer = asyncio.get_running_loop().call_later(self._body_s, body.drop, late)
        parts: list[bytes] = []
        try:
            while part := await request.content.readany():
                if body.n_bytes + len(part) > self.max_body_bytes:
                    raise web.HTTPRequestEntityTooLarge(self.max_body_bytes)
                self._count(body, len(part))
                parts.append(part)
        finally:
            timer.cancel()
            self._arriving.discard(body)
        return b"".join(parts)

    def forget(self, body: _Body) -> None:
        self._n_bytes -= body.n_bytes

    def _count(self, body: _Body, n: int) -> None:
        """Count `n` more bytes of a body. If all bodies are too large, drop the largest incomplete one."""
        body.n_bytes += n
        self._n_bytes += n
        while self._n_bytes > _BODIES * self.max_body_bytes:
            error = ApiError(429, "too many request bytes in memory; try again later", code="bodies_full")
            largest = max(self._arriving, key=lambda one: one.n_bytes, default=body)
            if largest is body:
                raise error
            self._arriving.remove(largest)
            self._n_bytes -= largest.n_bytes
            largest.n_bytes = 0
            largest.drop(error)

    def drain(self) -> None:
        """Answer 503 from now on, including to requests with incomplete bodies."""
        self.draining = True
        for body in self._arriving:
            body.drop(self.shutting_down())

    def check_open(self) -> None:
        if self.draining:
            raise self.shutting_down()

    @staticmethod
    def shutting_down() -> ApiError:
        return ApiError(503, "the server is shutting down", code="shutting_down")


def guard_of(config: RunConfig, host: str) -> Guard:
    """Return the guard of a server that listens at `host`."""
    return Guard(config.api_key.text if config.api_key else None, config.max_body_bytes, host)


@lru_cache(64)
def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a host name, which other machines resolve
        return False


def _names_this_machine(host: str) -> bool:
    """Return whether a Host header has an IP address, or a local name that foreign DNS cannot redirect."""
    name = host.partition("]")[0].strip("[") if host.startswith("[") else host.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.lower() in ("", "localhost", socket.gethostname().lower())
    return True


def _no_page(subject: str) -> ApiError:
    """Return the error for a web page's request: a page can send any, even to a rebound DNS name."""
    return ApiError(403, f"{subject} is not accepted without a key: set MPILLM_API_KEY", code="no_pages")
