"""Processes that call this one, and hold the connection, so that their end is known.

When a process ends, however it does, its kernel closes its connections. Nothing else is told here: a
connection that fails otherwise (reset or timed out by the network), or that can't be made, says nothing of
the process, and neither does a host that loses its power.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

KEY = "16s"  # the first field of what a caller says
_CONNECT_S = 5.0
_PAUSE_S = 0.1
_READ = 1  # selectors.EVENT_READ


class Callers:
    """The end that is called. A thread waits in the kernel; it calls `called` and `ended`."""

    def __init__(
        self,
        name: str,
        hello: struct.Struct,
        ended: Callable[[tuple[Any, ...]], None],
        called: Callable[[tuple[Any, ...]], None] = lambda fields: None,
    ) -> None:
        """Open a port. Raises OSError if none can be.

        `name`: the thread's. `hello`: what callers say, first the key; who does not know it is a stranger.
        `called` and `ended` get the other fields: of a caller, and of one whose process has ended without
        taking its leave.
        """
        import secrets  # as selectors and hmac: who only calls does without, whose start they would delay
        import selectors

        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._listener = socket.create_server(
            ("", 0), family=family, backlog=4096, dualstack_ipv6=family == socket.AF_INET6
        )
        self._hello = hello
        self._ended, self._called = ended, called
        self.port = int(self._listener.getsockname()[1])
        self.key = secrets.token_bytes(struct.calcsize(KEY))
        self._events = selectors.DefaultSelector()
        self._events.register(self._listener, _READ)
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while True:
            for key, _ in self._events.select():
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is self._listener:
                    self._accept()
                elif not self._hear(connection, key.data):
                    self._events.unregister(connection)
                    connection.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone by now, or no file descriptor is left: then select returns at once
            time.sleep(_PAUSE_S)
            return
        connection.setblocking(False)
        self._events.register(connection, _READ)

    def _hear(self, connection: socket.socket, known: tuple[Any, ...] | None) -> bool:
        """Return whether to go on listening to it."""
        try:
            said = connection.recv(1 if known else self._hello.size)
        except BlockingIOError:
            return True
        except OSError:  # the network's failure, not the process's
            return False
        if known is None and len(said) == self._hello.size:
            import hmac

            key, *fields = self._hello.unpack(said)
            if hmac.compare_digest(key, self.key):
                self._called(tuple(fields))
                self._events.modify(connection, _READ, tuple(fields))
                return True
        if known is not None and said == b"":
            self._ended(known)
        return False  # it has ended, or takes its leave, or is a stranger


def call(hosts: Sequence[str], port: int, hello: bytes) -> tuple[socket.socket | None, str]:
    """Call a process at the first of its names and addresses that answers.

    Returns the connection, and why the last one before did not answer; "" if none failed.
    """
    problem = ""
    for host in hosts:
        try:
            connection = socket.create_connection((host, port), _CONNECT_S)
            connection.sendall(hello)
        except OSError as error:
            problem = f"{host}: {error.strerror or error}"
            continue
        return connection, problem
    return None, problem


def own_addresses() -> tuple[str, ...]:
    """Return this host's addresses that others may reach, the one behind its name first."""
    import psutil

    own = [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith("127.")
    ]
    with contextlib.suppress(OSError):
        named = socket.gethostbyname(socket.gethostname())
        own.sort(key=lambda address: address != named)
    return tuple(own)
