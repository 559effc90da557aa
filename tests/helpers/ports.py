"""Ports for the servers of tests."""

from __future__ import annotations

import contextlib
import random
import socket
from collections import deque

# By these names, test processes on one machine never choose the same port, even before a server binds it, or
# when it has stopped and a client still tries to reach it. The kernel releases a name with its process.
_PORT_NAME = "\0mpillm-test-port-{}"
_NAMED: deque[contextlib.ExitStack] = deque()  # the sockets of each call, which have these names
_MAX_NAMED = 64  # calls; their tests have ended long before that many others


def free_ports(n: int) -> list[int]:
    """Return `n` free ports in a row, below those that the system gives out by itself."""
    while True:
        first = random.randrange(10_000, 32_768 - n)
        ports = list(range(first, first + n))
        with contextlib.ExitStack() as named, contextlib.ExitStack() as probes:
            try:
                for port in ports:
                    named.enter_context(socket.socket(socket.AF_UNIX)).bind(_PORT_NAME.format(port))
                    probes.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
            _NAMED.append(named.pop_all())
        if len(_NAMED) > _MAX_NAMED:
            _NAMED.popleft().close()
        return ports


def free_port() -> int:
    """Return a free port, as `free_ports`."""
    return free_ports(1)[0]
