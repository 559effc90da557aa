"""What stands before the routes of a server: who may come in, and how many bytes may come with them."""

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
from mpillm.endpoint.connections import note_begun, note_whole
from mpillm.endpoint.http_errors import error_response
from mpillm.options.run_config import RunConfig

_log = logging.getLogger(__name__)
_GONE = 499  # the client has closed the connection, as nginx counts it
BODY_S = 120.0
"""How long a client may take to send a body."""
_VERSIONS = (HttpVersion10, HttpVersion11)
_BODIES = 16  # of the largest size, that may be in memory at once
OPEN_PATHS = ("/health", "/metrics", "/version")
"""What needs no key, as with vLLM; everything else tells of single requests, or costs something."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Body:
    """The body of a request while it is needed; as a context manager, its bytes."""

    def __init__(self, guard: Guard, request: web.Request) -> None:
        self.n_bytes = 0  # so far
        self._guard = guard
        self._request = request

    def drop(self, error: ApiError) -> None:
        """Have who reads it get an error."""
        self._request.content.set_exception(error)

    async def __aenter__(self) -> bytes:
        try:
            data = await self._guard.whole(self._request, self)
        except BaseException:
            self._guard.forget(self)
            raise
        note_whole(self._request, True)
        return data

    async def __aexit__(self, *_: object) -> None:
        self._guard.forget(self)


class Guard:
    """Checks requests before their routes see them. Used in one event loop's thread."""

    def __init__(
        self, api_key: str | None = None, max_body_bytes: int = 1 << 24, host: str = "0.0.0.0"
    ) -> None:
        """`host`: where the server listens."""
        self.max_body_bytes = max_body_bytes
        self.draining = False
        self.active = 0  # handlers at work
        self._api_key = api_key.encode() if api_key else None
        self._is_local = is_loopback(host)
        self._arriving: set[_Body] = set()
        self._n_bytes = 0  # of all bodies

    async def answered(self, handler: Handler, request: web.Request, name: str) -> web.StreamResponse:
        """Return what a handler answers, its errors in OpenAI's form. `name`: the request's, for a person."""
        self.active += 1
        note_begun(request)
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
            return web.Response(status=_GONE)  # nobody reads it
        except Exception:  # noqa: BLE001 - whatever it is, the client gets an answer, and the log has the rest
            _log.exception("%s", name)
            return error_response(
                ApiError(500, f"internal error; the server's log has the traceback of {name}")
            )
        finally:
            self.active -= 1
            note_whole(request, False)

    def _check(self, request: web.Request) -> None:
        """Check the key. Where there is none, let no page in that a browser shows."""
        if request._version not in _VERSIONS:  # `version` is kept from when it is first asked for
            request._version = HttpVersion11  # the answer would be in the other one
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
        """Return what reads the body, and counts its bytes among those in memory until its block ends.

        Raises ApiError if it does not come in time, is compressed, says that it is too long, or if there are
        too many of them.
        """
        return _Body(self, request)

    async def whole(self, request: web.Request, body: _Body) -> bytes:
        """Read a body. For `_Body`, as `forget`."""
        if (coding := request.headers.get("Content-Encoding", "identity")) != "identity":
            # To unpack what may become a thousand times as long would keep everybody waiting.
            raise ApiError(415, f"Content-Encoding {coding[:30]} is not supported: send the body as it is")
        if (request.content_length or 0) > self.max_body_bytes:
            raise web.HTTPRequestEntityTooLarge(self.max_body_bytes)
        if request.content.is_eof():  # it came with the headers, as almost always
            data = await request.read()
            self._count(body, len(data))
            return data
        self._arriving.add(body)
        late = ApiError(408, f"the body has not come within {BODY_S:g} s", code="body_too_slow")
        timer = asyncio.get_running_loop().call_later(BODY_S, body.drop, late)
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
        """Count `n` more bytes; if there are too many, the largest body that is not whole makes room."""
        body.n_bytes += n
        self._n_bytes += n
        while self._n_bytes > _BODIES * self.max_body_bytes:
            error = ApiError(429, "too many bytes of requests are here; try again later", code="bodies_full")
            largest = max(self._arriving, key=lambda one: one.n_bytes, default=body)
            if largest is body:
                raise error
            self._arriving.remove(largest)
            self._n_bytes -= largest.n_bytes
            largest.n_bytes = 0
            largest.drop(error)

    def drain(self) -> None:
        """Answer 503 from now on, also to those whose bodies are not here yet."""
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
    """Return whether only this machine reaches `host`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which others resolve
        return False


def _names_this_machine(host: str) -> bool:
    """Return whether a Host header has an address, or a name that no other's DNS gives to this machine."""
    name = host.partition("]")[0].strip("[") if host.startswith("[") else host.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.lower() in ("", "localhost", socket.gethostname().lower())
    return True


def _no_page(what: str) -> ApiError:
    """Browsers send what any page wants, also to a name that has become this machine's (DNS rebinding)."""
    return ApiError(403, f"{what} is not taken without a key: set MPILLM_API_KEY", code="no_pages")
