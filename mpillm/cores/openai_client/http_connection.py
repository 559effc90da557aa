"""One HTTP/1.1 connection to a server, kept alive from request to request: RFC 9112, the client's part.

A client library's cost per request would limit the measurement, so responses are read here, with a callback
for each piece of a body.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Protocol, cast

from launch.bounded_http import MAX_ANSWER_BYTES

_MAX_HEAD = 1 << 16  # bytes of a status line with its headers
_MAX_INTERIM = 16  # responses such as 100 (Continue) before the final response
_MAX_CHUNK_LINE = 1 << 10
_HEX = b"0123456789abcdefABCDEF"


class HttpError(Exception):
    """The server broke the protocol or the connection. The message has the fault, not the address."""


class NothingSentBack(HttpError):
    """The connection failed, or ended, before a byte of the response."""


class NoAnswer(HttpError):
    """The response did not end in time."""


class Receiver(Protocol):
    """Receives a response, on the event loop; an exception of a method fails the response."""

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        """Handle the status, and the headers by their names in lower case."""

    def on_body(self, data: bytes, at: float) -> None:
        """Handle a piece of the body; `at`: time.perf_counter() when it was read from the socket."""

    def on_end(self, connection: HttpConnection) -> None:
        """Handle the end of the response."""

    def on_broken(self, error: Exception) -> None:
        """Handle a failure: the response stays incomplete."""


class HttpConnection(asyncio.Protocol):
    """Sends one request at a time. `reusable`: the server keeps the connection open for the next request."""

    def __init__(self) -> None:
        self.reusable = True
        self.closed = False
        self._receiver: Receiver | None = None
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._in_body = False
        self._interim = 0
        # bytes of the body still to come; None: the body has chunks, or ends with the connection
        self._left: int | None = None
        self._chunked = False

    def send(self, request: bytes, receiver: Receiver) -> None:
        """Send a complete request, head and body; `receiver` gets the response."""
        assert self._receiver is None and self._transport is not None
        if self.closed:  # since it was opened: the server closed it, or sent data first
            receiver.on_broken(NothingSentBack("it closed the connection before a request"))
            return
        self._receiver = receiver
        self._in_body = False
        self._interim = 0
        self._transport.write(request)

    def close(self) -> None:
        """Report nothing more about this connection."""
        self._receiver = None
        self.reusable = False
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    # --- called by the event loop ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self.reusable = False
        receiver = self._receiver
        if receiver is None:
            return
        if exc is None and self._in_body and self._left is None and not self._chunked:
            self._end(receiver)  # such a body ends with its connection
            return
        self._receiver = None
        started = self._in_body or bool(self._buffer)
        how = (
            "it closed the connection"
            if exc is None
            else f"the connection broke ({exc or type(exc).__name__})"
        )
        when = "in the middle of the answer" if started else "before an answer"
        receiver.on_broken((HttpError if started else NothingSentBack)(f"{how} {when}"))

    def data_received(self, data: bytes) -> None:
        at = time.perf_counter()
        receiver = self._receiver
        if receiver is None:  # no request was sent
            self.close()
            return
        self._buffer += data
        try:
            if not self._in_body and not self._read_head(receiver):
                return
            if self._chunked:
                self._read_chunks(receiver, at)
            else:
                self._read_plain(receiver, at)
        except Exception as error:  # noqa: BLE001 - invalid data of the server: the receiver handles it
            self.close()
            receiver.on_broken(error)

    # --- reading ---

    def _read_head(self, receiver: Receiver) -> bool:
        """Read the status line and the headers; return whether they are complete."""
        while True:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(self._buffer) > _MAX_HEAD:
                    raise HttpError(f"its headers are longer than {_MAX_HEAD} bytes")
                if not b"HTTP/1.".startswith(self._buffer[:7]):
                    raise HttpError(f"it sent something that is not HTTP: {bytes(self._buffer[:60])!r}")
                return False
            first, *lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
            del self._buffer[: end + 4]
            version, _, status_text = first.partition(" ")
            code = status_text[:3]
            if version not in ("HTTP/1.1", "HTTP/1.0") or not (code.isascii() and code.isdigit()):
                raise HttpError(f"it sent something that is not HTTP: {first[:60]!r}")
            status = int(code)
            if status >= 200:
                break  # final; informational responses, such as 100 (Continue), may precede it
            self._interim += 1
            if self._interim > _MAX_INTERIM:
                raise HttpError(f"it sent {self._interim} times HTTP {status} and no answer")
        headers = {}
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon:
                raise HttpError(f"it sent a header without a colon: {line[:60]!r}")
            headers[name.strip().lower()] = value.strip()
        keep = headers.get("connection", "").lower()
        self.reusable = "close" not in keep and (version == "HTTP/1.1" or "keep-alive" in keep)
        self._chunked = headers.get("transfer-encoding", "").lower().endswith("chunked")
        self._left = None
        if status in (204, 304):
            self._chunked, self._left = False, 0
        elif not self._chunked:
            length = headers.get("content-length")
            if length is None:
                self.reusable = False
            elif length.isascii() and length.isdigit():
                self._left = int(length)
            else:
                raise HttpError(f"its Content-Length is {length[:30]!r}")
        self._in_body = True
        receiver.on_head(status, headers)
        return True

    def _read_plain(self, receiver: Receiver, at: float) -> None:
        data = bytes(self._buffer if self._left is None else self._buffer[: self._left])
        del self._buffer[: len(data)]
        if self._left is not None:
            self._left -= len(data)
        if data:
            receiver.on_body(data, at)
        if self._left == 0:
            self._end(receiver)

    def _read_chunks(self, receiver: Receiver, at: float) -> None:
        buffer, start, pieces, last = self._buffer, 0, [], False
        while (end := buffer.find(b"\r\n", start, start + _MAX_CHUNK_LINE)) >= 0:
            text = bytes(buffer[start:end]).partition(b";")[0].strip()
            if not text or text.strip(_HEX):
                raise HttpError(
                    f"it sent {bytes(buffer[start:end])[:60]!r} where the size of a chunk belongs"
                )
            size = int(text, 16)
            if size > MAX_ANSWER_BYTES:
                raise HttpError(f"it sent a chunk of {size} bytes")
            if size == 0:  # trailers, then an empty line
                after = buffer.find(b"\r\n\r\n", end)
                last = after >= 0
                if last:
                    start = after + 4
                elif len(buffer) - end > _MAX_HEAD:
                    raise HttpError(f"its trailers are longer than {_MAX_HEAD} bytes")
                break
            if len(buffer) < end + size + 4:
                break
            if buffer[end + 2 + size : end + size + 4] != b"\r\n":
                raise HttpError("it sent a chunk that is longer than its size")
            pieces.append(bytes(buffer[end + 2 : end + 2 + size]))
            start = end + size + 4
        else:
            if len(buffer) - start >= _MAX_CHUNK_LINE:
                raise HttpError("it sent a chunk without a size")
        del buffer[:start]
        if pieces:
            receiver.on_body(b"".join(pieces), at)
        if last:
            self._end(receiver)

    def _end(self, receiver: Receiver) -> None:
        self._receiver = None
        if self._buffer:  # more than one response
            self.reusable = False
        receiver.on_end(self)
