"""Errors as HTTP responses, and the response to Expect."""

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
    """Request the body that a client delays (RFC 9110, 10.1.1). Runs before the guard."""
    if request.version < HttpVersion11:  # such a client does not support 100
        return None
    if request.headers["Expect"].lower() != "100-continue":
        return error_response(ApiError(417, "Expect: only 100-continue is supported"))
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # it counts bytes of the response, which has not begun
    return None


def downgrade_http_errors(record: logging.LogRecord) -> bool:
    """Log invalid HTTP without a traceback: the client gets 400, and the server has no fault."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.levelno, record.levelname = logging.INFO, "INFO"
        record.msg, record.args = "%s: %s", (record.getMessage(), one_line(repr(error)))
        record.exc_info = None
    return True
