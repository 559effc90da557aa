"""Errors over HTTP, and requests that go wrong before a route is reached."""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from mpillm.serve.api_error import ApiError

_RETRY_AFTER_S = "1"
BODY_S = 120.0
"""How long a client may take to send a body."""


def error_response(error: ApiError) -> web.Response:
    """Return an error as a response."""
    headers = {"Retry-After": _RETRY_AFTER_S} if error.status in (429, 503) else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.json_response(error.body(), status=error.status, headers=headers)


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
