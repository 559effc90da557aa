"""Lifelines: TCP connections to rank 0 of the ranks whose processes it can't see, those of other hosts.

When a process ends, however it does, its kernel closes its connection. So rank 0 knows of a lost rank within
a millisecond, and the others of a lost rank 0, whatever MPI library and launcher make of the loss; some
launchers leave rank 0 only a moment to say so. Nothing else is told here: a connection that fails otherwise
(reset or timed out by the network), or that can't be made, tells nothing, and neither does a host that loses
its power. Then the missing heartbeats do.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_KEY_BYTES = 16
_HELLO = struct.Struct(f"!{_KEY_BYTES}sI")  # the run's key and the caller's rank
_CONNECT_S = 5.0
_PAUSE_S = 0.1


class Address(NamedTuple):
    """Where rank 0 listens."""

    hosts: tuple[str, ...]  # its names and addresses, best first
    port: int
    key: bytes  # who does not know it is no rank of this run


def visible_pids() -> str:
    """Return what names the processes that this one can see: its host's, or its container's; "" if
    unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


class Lifelines:
    """Rank 0's ends. A thread waits for them in the kernel."""

    def __init__(self, hosts: tuple[str, ...]) -> None:
        """Open a port. Raises OSError if none can be."""
        import secrets  # as hmac below: for rank 0 alone, and only with several hosts

        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._listener = socket.create_server(
            ("", 0), family=family, backlog=4096, dualstack_ipv6=family == socket.AF_INET6
        )
        self.address = Address(hosts, self._listener.getsockname()[1], secrets.token_bytes(_KEY_BYTES))
        self.ended: frozenset[int] = frozenset()  # ranks whose processes have ended; replaced, never changed
        self._events = selectors.DefaultSelector()
        self._watch(self._listener, self._accept)
        threading.Thread(target=self._run, name="mpillm-lifelines", daemon=True).start()

    def _run(self) -> None:
        while True:
            for key, _ in self._events.select():
                key.data()

    def _watch(self, connection: socket.socket, act: Callable[[], None]) -> None:
        connection.setblocking(False)
        self._events.register(connection, selectors.EVENT_READ, act)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone by now, or no file descriptor is left: then select returns at once
            time.sleep(_PAUSE_S)
            return
        self._watch(connection, lambda: self._hello(connection))

    def _hello(self, connection: socket.socket) -> None:
        try:
            hello = connection.recv(_HELLO.size)
        except OSError:
            hello = b""
        self._events.unregister(connection)
        if len(hello) == _HELLO.size:
            import hmac

            key, rank = _HELLO.unpack(hello)
            if hmac.compare_digest(key, self.address.key):
                self._watch(connection, lambda: self._listen(connection, rank))
                return
        connection.close()

    def _listen(self, connection: socket.socket, rank: int) -> None:
        ended = has_ended(connection)
        if ended is None:
            return
        self._events.unregister(connection)
        connection.close()
        if ended:
            self.ended |= {rank}


class Lifeline:
    """Another rank's end."""

    def __init__(self, address: Address, rank: int) -> None:
        """Connect in a thread of its own; `problem` says why it could not."""
        self.problem = ""
        self._ended = False
        self._connection: socket.socket | None = None
        threading.Thread(target=self._connect, args=(address, rank), daemon=True).start()

    def _connect(self, address: Address, rank: int) -> None:
        for host in address.hosts:
            try:
                connection = socket.create_connection((host, address.port), _CONNECT_S)
                connection.sendall(_HELLO.pack(address.key, rank))
                connection.setblocking(False)
            except OSError as error:
                self.problem = f"{host}: {error.strerror or error}"
                continue
            self._connection = connection
            return

    def ended(self) -> bool:
        """Return whether rank 0's process has ended. Any thread may ask, often."""
        if self._connection is not None and not self._ended:
            self._ended = bool(has_ended(self._connection))
        return self._ended


def has_ended(connection: socket.socket) -> bool | None:
    """Return whether the process at the other end of a non-blocking connection has ended.

    None: it has not, as far as is known; False: the connection is lost, which says nothing of the process.
    """
    try:
        return True if connection.recv(1) == b"" else None
    except BlockingIOError:
        return None
    except OSError:
        return False
