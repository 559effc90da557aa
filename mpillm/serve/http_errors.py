"""Errors over HTTP, and requests that go wrong before a route is reached."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from mpillm.serve.api_error import ApiError

_log = logging.getLogger(__name__)
_RETRY_AFTER_S = "1"
_GONE = 499  # the client has closed the connection, as nginx counts it
BODY_S = 120.0
"""How long a client may take to send a body."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def error_response(error: ApiError) -> web.Response:
    """Return an error as a response."""
    headers = {"Retry-After": _RETRY_AFTER_S} if error.status in (429, 503) else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.json_response(error.body(), status=error.status, headers=headers)


async def answered(handler: Handler, request: web.Request, name: str) -> web.StreamResponse:
    """Return what a handler answers, its errors in OpenAI's form. `name`: of the request, for a person."""
    try:
        return await handler(request)
    except ApiError as error:
        return error_response(error)
    except web.HTTPRequestEntityTooLarge:
        most = request.client_max_size
        return error_response(ApiError(413, f"the body is larger than {most} bytes", code="body_too_large"))
    except web.HTTPException as error:
        response = error_response(ApiError(error.status, f"{request.method} {request.path}: {error.reason}"))
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except ConnectionError:
        return web.Response(status=_GONE)  # nobody reads it
    except Exception:  # noqa: BLE001 - whatever it is, the client gets an answer, and the log has the rest
        _log.exception("%s", name)
        return error_response(ApiError(500, f"internal error; the server's log has the traceback of {name}"))


async def body_of(request: web.Request) -> bytes:
    """Return the body.

    Raises ApiError if it does not come in time, is compressed, or says that it is too long.
    """
    if (coding := request.headers.get("Content-Encoding", "identity")) != "identity":
        # To unpack what may become a thousand times as long would keep everybody waiting.
        raise ApiError(415, f"Content-Encoding {coding[:30]} is not supported: send the body as it is")
    if (request.content_length or 0) > request.client_max_size:
        raise web.HTTPRequestEntityTooLarge(request.client_max_size)
    if request.content.is_eof():  # it came with the headers, as almost always
        return await request.read()
    try:
        body = await asyncio.wait_for(request.read(), BODY_S)
    except (asyncio.TimeoutError, TimeoutError):  # two classes in Python 3.10
        raise ApiError(408, f"the body has not come within {BODY_S:g} s", code="body_too_slow") from None
    # Before Python 3.12 `wait_for` swallows that this was cancelled if the body has just come.
    if request.transport is None:
        raise asyncio.CancelledError
    return body


async def on_expect(request: web.Request) -> web.Response | None:
    """Ask for the body that a client holds back (RFC 9110, 10.1.1). It comes before the guard."""
    if request.headers["Expect"].lower() != "100-continue":
        return error_response(ApiError(417, "Expect: only 100-continue is supported"))
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # of the response, which has not begun
    return None


def without_what_is_no_http(record: logging.LogRecord) -> bool:
    """Log without a traceback that a client, which gets 400, sent no HTTP: it is no error of the server."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.levelno, record.levelname = logging.INFO, "INFO"
        record.msg, record.args = f"{record.getMessage()}: {error!r}", ()
        record.exc_info = None
    return True
