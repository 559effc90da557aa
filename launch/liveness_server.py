"""Server side of liveness connections, whose close reports the exit of the process at the other end.

When a process exits for any reason, its kernel closes its connections. Other events do not count as an exit:
a connection that cannot be established, that the network resets or times out, or a host without power.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launch.handshake_listener import HandshakeListener

KEY = "16s"  # the first field of a greeting
_CONNECT_S = 5.0


class LivenessServer:
    """Server of liveness connections. Its thread waits in the kernel, and calls the callbacks."""

    def __init__(
        self,
        name: str,
        greeting: struct.Struct,
        on_exit: Callable[[tuple[Any, ...]], None],
        on_connect: Callable[[tuple[Any, ...], str], None] = lambda fields, address: None,
        on_byte: Callable[[tuple[Any, ...], bytes], bool] = lambda fields, byte: False,
        *,
        keeps_sockets: bool = False,
    ) -> None:
        """Open a port. Raises OSError if that fails.

        Args:
            name: the thread's name.
            greeting: layout of a client's greeting. Its first field is the key.
            on_exit: receives the other fields of a client whose process exits unannounced.
            on_connect: receives the other fields of a client, and its address.
            on_byte: receives the fields and a byte from the client; returns whether to keep the connection.
            keeps_sockets: keep the sockets of exited clients open. Processes that a client has left on its
                host then detect the exit of this process.
        """
        import secrets  # clients need neither this nor hmac, and the import would delay their start

        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        listener = socket.create_server(
            ("", 0), family=family, backlog=4096, dualstack_ipv6=family == socket.AF_INET6
        )
        self._greeting = greeting
        self._on_exit, self._on_connect, self._on_byte = on_exit, on_connect, on_byte
        self._exited: list[socket.socket] | None = [] if keeps_sockets else None
        self.port = int(listener.getsockname()[1])
        self.key = secrets.token_bytes(struct.calcsize(KEY))
        self._listener = HandshakeListener(name, listener, greeting.size, self._admit)

    @property
    def lacks_files(self) -> bool:
        """Whether a connection had to wait because this process may open no more files."""
        return self._listener.lacks_files

    def _admit(self, connection: socket.socket, greeting: bytes) -> None:
        import hmac

        key, *fields = self._greeting.unpack(greeting)
        if not hmac.compare_digest(key, self.key):
            connection.close()
            return
        with contextlib.suppress(OSError):  # the client has closed the connection, which `_read` detects
            self._on_connect(tuple(fields), connection.getpeername()[0].removeprefix("::ffff:"))
        self._listener.watch(connection, lambda: self._read(connection, tuple(fields)))

    def _read(self, connection: socket.socket, client: tuple[Any, ...]) -> bool:
        """Return whether to keep the connection."""
        try:
            byte = connection.recv(1)
        except BlockingIOError:
            return True
        except OSError:  # a failure of the network, not of the process
            return False
        if byte == b"":
            if self._exited is not None:
                with contextlib.suppress(OSError):  # no file descriptor is free
                    self._exited.append(connection.dup())
            self._on_exit(client)
        return byte != b"" and self._on_byte(client, byte)


def connect(hosts: Sequence[str], port: int, greeting: bytes) -> socket.socket | None:
    """Connect to the first of a server's names and addresses that answers, and send the greeting."""
    for host in hosts:
        with contextlib.suppress(OSError):
            connection = socket.create_connection((host, port), _CONNECT_S)
            connection.sendall(greeting)
            return connection
    return None


def unreachable(targets: Mapping[int, tuple[str, int]], seconds: float = _CONNECT_S) -> dict[int, str]:
    """Connect to all addresses and ports simultaneously; return the failures by key."""
    problems: dict[int, str] = {}
    waiting: dict[socket.socket, int] = {}
    for key, (address, port) in targets.items():
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            connection = socket.socket(family)
            connection.setblocking(False)
            if (number := connection.connect_ex((address, port))) not in (0, errno.EINPROGRESS):
                problems[key] = os.strerror(number)
            waiting[connection] = key
        except OSError as error:
            problems[key] = error.strerror or str(error)
    end = time.monotonic() + seconds
    left = {one.fileno(): one for one, key in waiting.items() if key not in problems}
    events = select.poll()  # `select` does not support descriptors above 1,023
    for fd in left:
        events.register(fd, select.POLLOUT)
    while left and (patience := end - time.monotonic()) > 0:
        for fd, _ in events.poll(patience * 1000):
            events.unregister(fd)
            connection = left.pop(fd)
            if number := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                problems[waiting[connection]] = os.strerror(number)
    problems |= {waiting[one]: f"no answer within {seconds:g} s" for one in left.values()}
    for connection in waiting:
        connection.close()
    return problems
