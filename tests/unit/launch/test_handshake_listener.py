"""Limits of unauthenticated connections. A client with the greeting is admitted whatever the others do."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from launch import handshake_listener
from launch.handshake_listener import HandshakeListener
from tests.helpers.support import wait_until

GREETING = b"0123456789abcdef"
PATIENCE_S = 60.0


class Admitted:
    """Counts the clients that a listener of its own has admitted."""

    def __init__(self, greeting_s: float = PATIENCE_S) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.greetings: list[bytes] = []
        self.listener = HandshakeListener("test", listener, len(GREETING), self._admit, greeting_s)

    def _admit(self, connection: socket.socket, greeting: bytes) -> None:
        self.greetings.append(greeting)
        connection.close()

    def call(self) -> socket.socket:
        return socket.create_connection(self.address, PATIENCE_S)


@pytest.fixture
def admitted(request: pytest.FixtureRequest) -> Iterator[Admitted]:
    """Yield a listener. Its parameter: how long a greeting may take."""
    made = Admitted(getattr(request, "param", PATIENCE_S))
    yield made
    made.listener.close()
    with pytest.raises(ConnectionRefusedError):
        made.call()


def closed(connection: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


def test_the_oldest_connections_are_dropped(admitted: Admitted) -> None:
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(admitted.call()) for _ in range(3 * handshake_listener._MAX_UNAUTHENTICATED)
        ]
        assert all(closed(one) for one in clients[: 2 * handshake_listener._MAX_UNAUTHENTICATED])
        with admitted.call() as caller:
            caller.sendall(GREETING)
            assert closed(caller) and admitted.greetings == [GREETING]
        assert len(admitted.listener._unauthenticated) <= handshake_listener._MAX_UNAUTHENTICATED


def test_connections_of_another_address_are_kept(admitted: Admitted) -> None:
    with contextlib.ExitStack() as stack:
        other = ("127.0.0.2", 0)  # all of 127.0.0.0/8 is this machine's, on Linux
        slow = stack.enter_context(socket.create_connection(admitted.address, PATIENCE_S, other))
        clients = [
            stack.enter_context(admitted.call()) for _ in range(3 * handshake_listener._MAX_UNAUTHENTICATED)
        ]
        assert all(closed(one) for one in clients[: 2 * handshake_listener._MAX_UNAUTHENTICATED])
        slow.sendall(GREETING)
        assert closed(slow) and admitted.greetings == [GREETING]


@pytest.mark.parametrize("admitted", [0.5], indirect=True)
def test_a_greeting_has_a_deadline_for_all_of_it(admitted: Admitted) -> None:
    """Not for each byte, nor for the next event."""
    with admitted.call() as silent, admitted.call() as slow:
        began, sent = time.monotonic(), 0
        with contextlib.suppress(OSError):
            while sent < len(GREETING):
                slow.sendall(GREETING[sent : sent + 1])
                sent += 1
                time.sleep(0.1)
        assert closed(silent) and closed(slow) and not admitted.greetings, time.monotonic() - began


def test_a_greeting_in_pieces(admitted: Admitted) -> None:
    with admitted.call() as caller:
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in GREETING:
            caller.sendall(bytes([byte]))
            time.sleep(0.001)
        assert closed(caller) and admitted.greetings == [GREETING]


def test_the_thread_ends_with_the_listener() -> None:
    made = Admitted()
    with made.call() as client:
        wait_until(lambda: made.listener._unauthenticated, "the client")
        made.listener.close()
        assert closed(client)
    wait_until(lambda: all(thread.name != "test" for thread in threading.enumerate()), "the thread's end")
