"""Listener that limits unauthenticated connections, which have not yet sent their greeting.

The number and the waiting time of these connections are limited. At the limit, the listener closes the oldest
connection of the address with the most connections. An authorized client sends its greeting immediately.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable

_MAX_UNAUTHENTICATED = 32
_CROWDED_S = 0.001  # wait after closing a connection at the limit, so each has at least 32 ms
_PAUSE_S = 0.1  # wait if no file descriptor is free and no unauthenticated connection can be closed
_READ = 1  # selectors.EVENT_READ


class HandshakeListener:
    """Watches a listening socket in a separate thread."""

    def __init__(
        self,
        name: str,
        listener: socket.socket,
        n_bytes: int,
        admit: Callable[[socket.socket, bytes], None],
        greeting_s: float = 10.0,  # time for the complete greeting
    ) -> None:
        """`name`: the thread's name.

        `admit` receives a non-blocking connection, which it then owns, and the connection's greeting of
        `n_bytes`. It must not wait.
        """
        import selectors  # not needed by processes that only connect: the import delays their start

        self._listener = listener
        listener.setblocking(False)
        self._n_bytes, self._greeting_s = n_bytes, greeting_s
        self._admit = admit
        self._closed = False
        self.lacks_files = False  # a connection had to wait for a free file descriptor
        # Deadline, bytes received so far, and address by connection; oldest first.
        self._unauthenticated: dict[socket.socket, tuple[float, bytearray, str]] = {}
        self._events = selectors.DefaultSelector()
        self._events.register(listener, _READ, self._accept)
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def watch(self, connection: socket.socket, on_readable: Callable[[], bool]) -> None:
        """Call `on_readable` whenever data arrive. When it returns False, close the connection.

        `admit` may call this.
        """

        def handle() -> None:
            if not on_readable():
                self._drop(connection)

        self._events.register(connection, _READ, handle)

    def close(self) -> None:
        """Accept no more connections."""
        self._closed = True
        with contextlib.suppress(OSError):  # the listener is already closed
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread

    # --- in the thread ---

    def _run(self) -> None:
        while not self._closed:
            patience = None
            if self._unauthenticated:
                patience = max(0.0, next(iter(self._unauthenticated.values()))[0] - time.monotonic())
            for key, _ in self._events.select(patience):
                key.data()
            now = time.monotonic()
            for connection in [one for one, (until, *_) in self._unauthenticated.items() if until < now]:
                self._drop(connection)
        self._listener.close()
        for connection in [*self._unauthenticated]:
            self._drop(connection)

    def _accept(self) -> None:
        if len(self._unauthenticated) >= _MAX_UNAUTHENTICATED:
            self._drop_oldest()
        try:
            connection, address = self._listener.accept()
        except BlockingIOError:  # the client has closed the connection
            return
        except OSError as error:  # no file descriptor is free, or the listener is closed
            self.lacks_files |= error.errno == errno.EMFILE
            if not self._closed:
                self._drop_oldest()
            return
        connection.setblocking(False)
        self._unauthenticated[connection] = time.monotonic() + self._greeting_s, bytearray(), address[0]
        self._events.register(connection, _READ, lambda: self._read(connection))

    def _drop_oldest(self) -> None:
        """Close the oldest connection of the address with the most connections."""
        if self._unauthenticated:
            hosts = [host for _, _, host in self._unauthenticated.values()]
            busiest = max(hosts, key=hosts.count)
            self._drop(next(one for one, (_, _, host) in self._unauthenticated.items() if host == busiest))
            time.sleep(_CROWDED_S)
        else:
            time.sleep(_PAUSE_S)

    def _read(self, connection: socket.socket) -> None:
        if connection not in self._unauthenticated:  # dropped earlier in this turn of `_run`
            return
        _, greeting, _ = self._unauthenticated[connection]
        try:
            more = connection.recv(self._n_bytes - len(greeting))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        greeting += more
        if len(greeting) == self._n_bytes:
            self._events.unregister(connection)
            del self._unauthenticated[connection]
            self._admit(connection, bytes(greeting))
        elif not more:
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._unauthenticated.pop(connection, None)
        self._events.unregister(connection)
        connection.close()
