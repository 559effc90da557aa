"""Blocking HTTP requests to external servers, with limits of bytes and time on their responses.

`http.client` has no such limits: its timeout restarts with each byte, and it reads any number of responses
such as 100 (Continue) and of trailers.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import os
import socket
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from launch.outside import one_line

MOST_PAGE = 1 << 24
"""Bytes of a page: health, models, counts, an error."""
MOST_ANSWER = 1 << 28
"""Bytes of an answer in one piece, or of a chunk of it."""
MOST_EVENT = 1 << 24
"""Bytes of a stream without the end of an event."""
OF_GRPC = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", MOST_ANSWER)]
"""Options of a channel: the bytes of what we send are ours to say, those of an answer are not."""


class ReplyError(Exception):
    """A server sent no response, or an invalid one.

    The message describes the response in one line, without the server's address.
    """


class Bounded:
    """Keeps a connection to ``host:port`` open, as a context, for one request at a time."""

    def __init__(self, address: str) -> None:
        """Connect when a request is made. Raises ReplyError for what is no address."""
        try:
            self._http = http.client.HTTPConnection(address)
        except http.client.InvalidURL as error:
            raise ReplyError(one_line(str(error))) from None

    def __enter__(self) -> Bounded:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    @contextlib.contextmanager
    def ask(
        self, path: str, timeout_s: float, body: bytes | None = None, most: int = MOST_PAGE
    ) -> Iterator[http.client.HTTPResponse]:
        """POST a JSON `body`, or GET without one, and yield the response, whose body is read inside.

        All of it may take `timeout_s`, and `most` bytes. Raises ReplyError if it does not; the connection is
        closed then, and the next request opens another.
        """
        end = time.monotonic() + timeout_s
        self._http.timeout = timeout_s
        if self._http.sock is not None:
            self._http.sock.settimeout(timeout_s)

        def response(sock: socket.socket, *args: Any, **options: Any) -> http.client.HTTPResponse:
            made = http.client.HTTPResponse(sock, *args, **options)
            made.fp = io.BufferedReader(_Bounds(sock, made.fp, end, timeout_s, most))
            return made

        self._http.response_class = response  # type: ignore[assignment]
        whole = False
        try:
            if body is None:
                self._http.request("GET", path)
            else:
                self._http.request("POST", path, body, {"Content-Type": "application/json"})
            with self._http.getresponse() as answer:
                yield answer
                whole = answer.isclosed()
        except TimeoutError:
            raise _late(timeout_s) from None
        except OSError as error:
            raise ReplyError(os.strerror(error.errno) if error.errno else one_line(str(error))) from None
        except http.client.HTTPException as error:
            raise ReplyError(one_line(f"{type(error).__name__}: {error}")) from None
        finally:
            if not whole:
                self._http.close()


def page(url: str, timeout_s: float, body: bytes | None = None) -> tuple[int, bytes]:
    """Return the status and the body of the answer to one request (see `Bounded.ask`). Raises ReplyError."""
    parts = urlsplit(url)
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    with Bounded(parts.netloc) as server, server.ask(path or "/", timeout_s, body) as answer:
        return answer.status, answer.read()


class _Bounds(io.RawIOBase):
    """Socket reads with a limit of bytes and a deadline."""

    def __init__(self, sock: socket.socket, plain: Any, end: float, timeout_s: float, most: int) -> None:
        self._sock = sock
        self._plain = plain.detach()
        self._end = end
        self._timeout_s = timeout_s
        self._most = self._left = most

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
            raise ReplyError(f"its answer is longer than {self._most} bytes")
        return n

    def close(self) -> None:
        self._plain.close()
        super().close()


def _late(timeout_s: float) -> ReplyError:
    return ReplyError(f"it has not answered within {timeout_s:g} s")
