"""A server that sends bytes as they are, answers of servers, and words that damage them."""

from __future__ import annotations

import contextlib
import socket
import threading
from functools import cache

from tests.helpers.fuzzing import json_bytes
from tests.helpers.ports import free_port

JSON_WORDS = [
    b"1e999",
    b"NaN",
    b"-Infinity",
    b"\\ud800",
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"9" * 5000,
    b"null",
    b"\\u0000",
]
EVENT = {
    "id": "a",
    "object": "text_completion",
    "choices": [{"index": 0, "text": "t", "token_ids": [5], "finish_reason": None, "logprobs": None}],
}
LAST = {
    "choices": [{"index": 0, "text": "u", "token_ids": [6], "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
}
STREAM = b"".join(b"data: %b\n\n" % json_bytes(one) for one in (EVENT, LAST)) + b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(STREAM), STREAM)
PLAIN = HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(json_bytes(LAST)), json_bytes(LAST))
ERROR = b'HTTP/1.1 429 Too Many Requests\r\nContent-Length: 24\r\n\r\n{"error":{"message":"x"}}'
HTTP_WORDS = [
    b"\r\n",
    b"0\r\n\r\n",
    b"ffffffff\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"Content-Length: 5\r\n",
    b"Retry-After: 1e400\r\n",
    b"Retry-After: Mon, 01 Jan 0001 00:00:00 -0000\r\n",
    b"Retry-After: Mon, 01 Jan 99999999999 00:00:00 GMT\r\n",
    b": ",
    b"data: ",
    b"\n\n",
    b"-1",
]


class RawServer:
    """Gives each connection the same bytes, once it has asked for something, and closes it."""

    def __init__(self) -> None:
        self.reply = b""
        self._listener = socket.create_server(("127.0.0.1", free_port()))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.settimeout(5.0)
                request = connection.recv(1 << 16)
                length = int(request.lower().partition(b"content-length:")[2].split()[0])
                while len(request.partition(b"\r\n\r\n")[2]) < length and (more := connection.recv(1 << 16)):
                    request += more
                connection.sendall(self.reply)


@cache
def raw_server() -> RawServer:
    return RawServer()


def whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


GENERATED = {"text_output": "a", "sequence_length": 3}
