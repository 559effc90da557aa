"""Blocking HTTP requests to external servers, with limits of bytes and time on their responses.

`http.client` has no such limits. Its timeout restarts with each byte. It reads any number of 100 (Continue)
responses, and of trailers.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import os
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from launch.safe_text import one_line

MAX_PAGE_BYTES = 1 << 24
"""Limit of a small response: health, models, counts, an error."""
MAX_ANSWER_BYTES = 1 << 28
"""Limit of a response, or of one chunk of a response."""
MAX_EVENT_BYTES = 1 << 24
"""Limit of one event in a stream."""
GRPC_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", MAX_ANSWER_BYTES)]
"""Options of a gRPC channel: the size of responses is limited, not the size of requests."""


class ReplyError(Exception):
    """A server sent no response, or an invalid one.

    The message describes the response in one line, without the server's address.
    """


class BoundedClient:
    """Context manager with an open connection to ``host:port``, for one request at a time."""

    def __init__(self, address: str) -> None:
        """Raises ReplyError if the address is invalid. The first request connects."""
        try:
            self._http = http.client.HTTPConnection(address)
        except http.client.InvalidURL as error:
            raise ReplyError(one_line(str(error))) from None

    def __enter__(self) -> BoundedClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    @contextlib.contextmanager
    def request(
        self, path: str, timeout_s: float, body: bytes | None = None, max_bytes: int = MAX_PAGE_BYTES
    ) -> Iterator[http.client.HTTPResponse]:
        """POST a JSON `body`, or GET without one, and yield the response. Read it inside the `with` block.

        The request may take `timeout_s`, and the response may have `max_bytes`. Beyond that, this raises
        ReplyError and closes the connection. The next request opens another one.
        """
        end = time.monotonic() + timeout_s
        self._http.timeout = timeout_s
        if self._http.sock is not None:
            self._http.sock.settimeout(timeout_s)

        def response(sock: socket.socket, *args: Any, **options: Any) -> http.client.HTTPResponse:
            limited = http.client.HTTPResponse(sock, *args, **options)
            limited.fp = io.BufferedReader(_LimitedReader(sock, limited.fp, end, timeout_s, max_bytes))
            return limited

        self._http.response_class = response  # type: ignore[assignment]
        is_complete = False
        try:
            if body is None:
                self._http.request("GET", path)
            else:
                self._http.request("POST", path, body, {"Content-Type": "application/json"})
            with self._http.getresponse() as answer:
                yield answer
                is_complete = answer.isclosed()
        except TimeoutError:
            raise _late(timeout_s) from None
        except OSError as error:
            raise ReplyError(os.strerror(error.errno) if error.errno else one_line(str(error))) from None
        except http.client.HTTPException as error:
            raise ReplyError(one_line(f"{type(error).__name__}: {error}")) from None
        finally:
            if not is_complete:
                self._http.close()


def page(url: str, timeout_s: float, body: bytes | None = None) -> tuple[int, bytes]:
    """Return the status and the body of one response (see `BoundedClient.request`). Raises ReplyError."""
    parts = urlsplit(url)
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    with BoundedClient(parts.netloc) as server, server.request(path or "/", timeout_s, body) as answer:
        return answer.status, answer.read()


class _LimitedReader(io.RawIOBase):
    """Socket reads with a limit of bytes and a deadline."""

    def __init__(self, sock: socket.socket, plain: Any, end: float, timeout_s: float, max_bytes: int) -> None:
        self._sock = sock
        self._plain = plain.detach()
        self._end = end
        self._timeout_s = timeout_s
        self._max_bytes = self._left = max_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._end - time.monotonic()
        if left_s <= 0:
            raise _late(self._timeout_s)
        self._sock.settimeout(left_s)
        n: int = self._plain.readinto(buffer)
        self._left -= n
        if self._left < 0:
            raise ReplyError(f"its answer is longer than {self._max_bytes} bytes")
        return n

    def close(self) -> None:
        self._plain.close()
        super().close()


def _late(timeout_s: float) -> ReplyError:
    return ReplyError(f"it has not answered within {timeout_s:g} s")
