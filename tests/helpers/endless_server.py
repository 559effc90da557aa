"""A server that never stops: what foreign servers must not do to their clients."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

from tests.helpers.ports import free_port

_MOST_S = 60.0  # that it goes on with a client that stays


@contextlib.contextmanager
def endless_server(first: bytes, piece: bytes, pause_s: float = 0.0) -> Iterator[str]:
    """Yield the address of a server that sends `first`, and then `piece` for ever, to every client."""
    ended = threading.Event()

    def talk(connection: socket.socket) -> None:
        connection.settimeout(1.0)
        until = time.monotonic() + _MOST_S
        with connection, contextlib.suppress(OSError):  # the client has had enough
            connection.recv(1 << 16)
            connection.sendall(first)
            while not ended.is_set() and time.monotonic() < until:
                connection.sendall(piece)
                ended.wait(pause_s)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threads.append(thread := threading.Thread(target=talk, args=(connection,), daemon=True))
            thread.start()

    threads: list[threading.Thread] = []
    with socket.create_server(("127.0.0.1", free_port())) as listener:
        threads.append(thread := threading.Thread(target=accept, daemon=True))
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            ended.set()
            with contextlib.suppress(OSError):  # wakes the thread
                listener.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join(_MOST_S)
        assert not thread.is_alive()


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
ENDLESS = {
    "a body of gigabytes": (OK + b"Content-Length: 9000000000\r\n\r\n", b"x" * (1 << 20)),
    "chunks without end": (CHUNKED, b"%x\r\n%b\r\n" % (1 << 16, b"x" * (1 << 16))),
    "the size of a chunk without end": (CHUNKED, b"0" * (1 << 16)),
    "trailers without end": (CHUNKED + b"0\r\n", b"a: b\r\n" * 10000),
    "headers without end": (OK, b"a: b\r\n" * 10000),
    "100 (Continue) without end": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
}
"""What such a server sends first, and then for ever."""
