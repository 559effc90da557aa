"""A door: strangers are few and stay a short time, and who knows the greeting comes in whatever they do."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from launch import door
from launch.door import Door
from tests.helpers.support import wait_until

GREETING = b"0123456789abcdef"
PATIENCE_S = 60.0


class Admitted:
    """Counts who has come in through a door of its own."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.said: list[bytes] = []
        self.door = Door("test", listener, len(GREETING), self._admit)

    def _admit(self, connection: socket.socket, said: bytes) -> None:
        self.said.append(said)
        connection.close()

    def call(self) -> socket.socket:
        return socket.create_connection(self.address, PATIENCE_S)


@pytest.fixture
def admitted() -> Iterator[Admitted]:
    made = Admitted()
    yield made
    made.door.close()
    with pytest.raises(ConnectionRefusedError):
        made.call()


def closed(connection: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


def test_the_strangers_that_have_waited_longest_make_room(admitted: Admitted) -> None:
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(admitted.call()) for _ in range(3 * door._STRANGERS)]
        assert all(closed(one) for one in strangers[: 2 * door._STRANGERS])
        with admitted.call() as caller:
            caller.sendall(GREETING)
            assert closed(caller) and admitted.said == [GREETING]
        assert len(admitted.door._strangers) <= door._STRANGERS


def test_strangers_of_another_address_make_no_room(admitted: Admitted) -> None:
    with contextlib.ExitStack() as stack:
        other = ("127.0.0.2", 0)  # all of 127.0.0.0/8 is this machine's, on Linux
        slow = stack.enter_context(socket.create_connection(admitted.address, PATIENCE_S, other))
        strangers = [stack.enter_context(admitted.call()) for _ in range(3 * door._STRANGERS)]
        assert all(closed(one) for one in strangers[: 2 * door._STRANGERS])
        slow.sendall(GREETING)
        assert closed(slow) and admitted.said == [GREETING]


def test_a_greeting_has_a_deadline_for_all_of_it(admitted: Admitted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each byte, nor for the next event."""
    monkeypatch.setattr(door, "_GREETING_S", 0.5)
    with admitted.call() as silent, admitted.call() as slow:
        began, sent = time.monotonic(), 0
        with contextlib.suppress(OSError):
            while sent < len(GREETING):
                slow.sendall(GREETING[sent : sent + 1])
                sent += 1
                time.sleep(0.1)
        assert closed(silent) and closed(slow) and not admitted.said, time.monotonic() - began


def test_a_greeting_in_pieces(admitted: Admitted) -> None:
    with admitted.call() as caller:
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in GREETING:
            caller.sendall(bytes([byte]))
            time.sleep(0.001)
        assert closed(caller) and admitted.said == [GREETING]


def test_the_thread_ends_with_the_door() -> None:
    made = Admitted()
    with made.call() as stranger:
        wait_until(lambda: made.door._strangers, "the stranger")
        made.door.close()
        assert closed(stranger)
    wait_until(lambda: all(thread.name != "test" for thread in threading.enumerate()), "the thread's end")
