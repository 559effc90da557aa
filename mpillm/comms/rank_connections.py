"""Liveness connections between rank 0 and the ranks of other hosts.

Rank 0 detects the exit of such a rank within a millisecond (`launch.liveness_server`), and the rank detects
the exit of rank 0. This depends neither on the MPI library nor on the launcher. Some launchers leave rank 0
little time to report a loss. If a connection does not report an exit, missing heartbeats do.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import NamedTuple

from launch.liveness_server import KEY, LivenessServer, connect
from mpillm.comms import connection_holder

_GREETING = struct.Struct(f"!{KEY}I")  # the run's key and the rank


class Address(NamedTuple):
    """Address of rank 0's liveness server."""

    hosts: tuple[str, ...]  # names and addresses of rank 0's host, best first
    port: int
    key: bytes  # of this run


class RankConnections:
    """Rank 0's side of the connections."""

    def __init__(self, hosts: tuple[str, ...]) -> None:
        """Open a port. Raises OSError if that fails."""
        self.exited: frozenset[int] = frozenset()  # ranks; the set is replaced, never changed
        self.on_exit: Callable[[], None] = lambda: None  # called in another thread, after each exit
        server = LivenessServer("mpillm-connections", _GREETING, self._on_exit, keeps_sockets=True)
        self.address = Address(hosts, server.port, server.key)

    def _on_exit(self, fields: tuple[int]) -> None:
        self.exited |= {*fields}
        self.on_exit()


class Rank0Connection:
    """Another rank's side of its connection to rank 0."""

    def __init__(self, address: Address, rank: int) -> None:
        """Connect in a separate thread."""
        self._has_exited = False
        self._connection: socket.socket | None = None
        threading.Thread(target=self._connect, args=(address, rank), daemon=True).start()

    def _connect(self, address: Address, rank: int) -> None:
        connection = connect(address.hosts, address.port, _GREETING.pack(address.key, rank))
        if connection is not None:
            connection_holder.hold(rank0=connection.fileno())
            connection.setblocking(False)
        self._connection = connection

    def has_exited(self) -> bool:
        """Return whether rank 0's process has exited. Any thread may call this often."""
        if self._connection is not None and not self._has_exited:
            with contextlib.suppress(OSError):  # no data, or a failure of the network
                self._has_exited = self._connection.recv(1) == b""
        return self._has_exited
