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

from launch.door import Door

KEY = "16s"  # the first field of what a caller says
_CONNECT_S = 5.0


class Callers:
    """Server of liveness connections. Its thread waits in the kernel, and calls `called` and `ended`."""

    def __init__(
        self,
        name: str,
        hello: struct.Struct,
        ended: Callable[[tuple[Any, ...]], None],
        called: Callable[[tuple[Any, ...], str], None] = lambda fields, address: None,
        stays: Callable[[tuple[Any, ...], bytes], bool] = lambda fields, word: False,
        *,
        holds: bool = False,
    ) -> None:
        """Open a port. Raises OSError if none can be.

        `name`: the thread's. `hello`: what callers say, first the key; who does not know it is a stranger.
        `called` gets the other fields of a caller, and its address; `ended` the fields of one whose process
        has ended without taking its leave. `stays` gets the fields and one more byte that a caller says, and
        returns whether it does not take its leave by it. `holds`: connections stay, so that what a caller has
        left on its host hears of this process's end.
        """
        import secrets  # as hmac: who only calls does without, whose start it would delay

        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        listener = socket.create_server(
            ("", 0), family=family, backlog=4096, dualstack_ipv6=family == socket.AF_INET6
        )
        self._hello = hello
        self._ended, self._called, self._stays = ended, called, stays
        self._held: list[socket.socket] | None = [] if holds else None
        self.port = int(listener.getsockname()[1])
        self.key = secrets.token_bytes(struct.calcsize(KEY))
        self._door = Door(name, listener, hello.size, self._admit)

    def _admit(self, connection: socket.socket, said: bytes) -> None:
        import hmac

        key, *fields = self._hello.unpack(said)
        if not hmac.compare_digest(key, self.key):
            connection.close()
            return
        with contextlib.suppress(OSError):  # it has gone by now, as is noticed below
            self._called(tuple(fields), connection.getpeername()[0].removeprefix("::ffff:"))
        self._door.watch(connection, lambda: self._hear(connection, tuple(fields)))

    def _hear(self, connection: socket.socket, caller: tuple[Any, ...]) -> bool:
        """Return whether to go on listening to it."""
        try:
            said = connection.recv(1)
        except BlockingIOError:
            return True
        except OSError:  # the network's failure, not the process's
            return False
        if said == b"":
            if self._held is not None:
                with contextlib.suppress(OSError):  # no file descriptor is left
                    self._held.append(connection.dup())
            self._ended(caller)
        return said != b"" and self._stays(caller, said)  # or it has ended, or takes its leave


def call(hosts: Sequence[str], port: int, hello: bytes) -> socket.socket | None:
    """Call a process at the first of its names and addresses that answers; return the connection."""
    for host in hosts:
        with contextlib.suppress(OSError):
            connection = socket.create_connection((host, port), _CONNECT_S)
            connection.sendall(hello)
            return connection
    return None


def unreached(targets: Mapping[int, tuple[str, int]], seconds: float = _CONNECT_S) -> dict[int, str]:
    """Connect to addresses and ports, all at the same time; return why not, by key, for those that fail."""
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
    left = {one for one, key in waiting.items() if key not in problems}
    while left and (patience := end - time.monotonic()) > 0:
        for connection in select.select([], [*left], [], patience)[1]:
            left.remove(connection)
            if number := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                problems[waiting[connection]] = os.strerror(number)
    problems |= {waiting[one]: f"no answer within {seconds:g} s" for one in left}
    for connection in waiting:
        connection.close()
    return problems
