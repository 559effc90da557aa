"""Lifelines: TCP connections to rank 0 of the ranks whose processes it can't see, those of other hosts.

So rank 0 knows of a lost rank within a millisecond (`launch.callers`), and the others of a lost rank 0,
whatever MPI library and launcher make of the loss; some launchers leave rank 0 only a moment to say so. Where
the connection tells nothing, the missing heartbeats do.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import NamedTuple

from launch.callers import KEY, Callers, call
from mpillm.comms import kept_connections

_HELLO = struct.Struct(f"!{KEY}I")  # the run's key and the caller's rank


class Address(NamedTuple):
    """Where rank 0 listens."""

    hosts: tuple[str, ...]  # its names and addresses, best first
    port: int
    key: bytes  # who does not know it is no rank of this run


class Lifelines:
    """Rank 0's ends."""

    def __init__(self, hosts: tuple[str, ...]) -> None:
        """Open a port. Raises OSError if none can be."""
        self.ended: frozenset[int] = frozenset()  # ranks whose processes have ended; replaced, never changed
        self.on_end: Callable[[], None] = lambda: None  # called in another thread, after each
        callers = Callers("mpillm-lifelines", _HELLO, self._note_end, holds=True)
        self.address = Address(hosts, callers.port, callers.key)

    def _note_end(self, fields: tuple[int]) -> None:
        self.ended |= {*fields}
        self.on_end()


class Lifeline:
    """Another rank's end."""

    def __init__(self, address: Address, rank: int) -> None:
        """Connect in a thread of its own."""
        self._ended = False
        self._connection: socket.socket | None = None
        threading.Thread(target=self._connect, args=(address, rank), daemon=True).start()

    def _connect(self, address: Address, rank: int) -> None:
        hello = _HELLO.pack(address.key, rank)
        connection = call(address.hosts, address.port, hello)
        if connection is not None:
            kept_connections.keep(rank0=connection.fileno())
            connection.setblocking(False)
        self._connection = connection

    def ended(self) -> bool:
        """Return whether rank 0's process has ended. Any thread may ask, often."""
        if self._connection is not None and not self._ended:
            with contextlib.suppress(OSError):  # nothing has come, or the network has failed, not the process
                self._ended = self._connection.recv(1) == b""
        return self._ended
