"""Listener that limits unauthenticated connections, which have not yet sent their greeting.

Their number and their waiting time are limited. At the limit, the listener closes the oldest connection of
the address with the most connections, because an authorized client sends its greeting immediately.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

_STRANGERS = 32
_GREETING_S = 10.0  # for all of it
_CROWDED_S = 0.001  # between two that come while it is full, so each has 32 of these at least
_PAUSE_S = 0.1  # no file descriptor is left, though no stranger has one
_READ = 1  # selectors.EVENT_READ


class Door:
    """Watches a listening socket in a thread of its own."""

    def __init__(
        self, name: str, listener: socket.socket, n_bytes: int, admit: Callable[[socket.socket, bytes], None]
    ) -> None:
        """`name`: the thread's.

        `admit` gets a connection, which is non-blocking and its own from then on, and its greeting of
        `n_bytes`; it must not wait.
        """
        import selectors  # not for those that only call: it would delay their start

        self._listener = listener
        listener.setblocking(False)
        self._n_bytes = n_bytes
        self._admit = admit
        self._closed = False
        # Until when, what they have said, from where; oldest first.
        self._strangers: dict[socket.socket, tuple[float, bytearray, str]] = {}
        self._events = selectors.DefaultSelector()
        self._events.register(listener, _READ, self._accept)
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def watch(self, connection: socket.socket, heard: Callable[[], bool]) -> None:
        """Call `heard` when something comes, until it returns False; then close the connection.

        For `admit`, in its thread.
        """

        def hear() -> None:
            if not heard():
                self._let_go(connection)

        self._events.register(connection, _READ, hear)

    def close(self) -> None:
        """Let nobody in any more."""
        self._closed = True
        with contextlib.suppress(OSError):  # it is closed
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread

    # --- in the thread ---

    def _run(self) -> None:
        while not self._closed:
            patience = None
            if self._strangers:
                patience = max(0.0, next(iter(self._strangers.values()))[0] - time.monotonic())
            for key, _ in self._events.select(patience):
                key.data()
            now = time.monotonic()
            for connection in [one for one, (until, *_) in self._strangers.items() if until < now]:
                self._let_go(connection)
        self._listener.close()
        for connection in [*self._strangers]:
            self._let_go(connection)

    def _accept(self) -> None:
        if len(self._strangers) >= _STRANGERS:
            self._crowded()
        try:
            connection, address = self._listener.accept()
        except BlockingIOError:  # it has gone by now
            return
        except OSError:  # no file descriptor is left, or nobody is let in any more
            if not self._closed:
                self._crowded()
            return
        connection.setblocking(False)
        self._strangers[connection] = time.monotonic() + _GREETING_S, bytearray(), address[0]
        self._events.register(connection, _READ, lambda: self._hear(connection))

    def _crowded(self) -> None:
        """Make room for one more."""
        if self._strangers:
            hosts = [host for _, _, host in self._strangers.values()]
            most = max(hosts, key=hosts.count)
            self._let_go(next(one for one, (_, _, host) in self._strangers.items() if host == most))
            time.sleep(_CROWDED_S)
        else:
            time.sleep(_PAUSE_S)

    def _hear(self, connection: socket.socket) -> None:
        if connection not in self._strangers:  # it had to go in this turn
            return
        _, said, _ = self._strangers[connection]
        try:
            more = connection.recv(self._n_bytes - len(said))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        said += more
        if len(said) == self._n_bytes:
            self._events.unregister(connection)
            del self._strangers[connection]
            self._admit(connection, bytes(said))
        elif not more:
            self._let_go(connection)

    def _let_go(self, connection: socket.socket) -> None:
        self._strangers.pop(connection, None)
        self._events.unregister(connection)
        connection.close()
