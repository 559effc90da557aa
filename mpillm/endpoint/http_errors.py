"""Errors as HTTP responses, and what HTTP asks for before a body."""

from __future__ import annotations

import logging

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError

from launch.safe_text import one_line
from mpillm.endpoint.api_error import ApiError


def error_response(error: ApiError) -> web.Response:
    """Return an error as a response."""
    headers = {"Retry-After": str(error.retry_after_s)} if error.status in (429, 503) else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.json_response(error.body(), status=error.status, headers=headers)


async def on_expect(request: web.Request) -> web.Response | None:
    """Ask for the body that a client holds back (RFC 9110, 10.1.1). It comes before the guard."""
    if request.version < HttpVersion11:  # such a client knows no 100
        return None
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
        record.msg, record.args = "%s: %s", (record.getMessage(), one_line(repr(error)))
        record.exc_info = None
    return True
