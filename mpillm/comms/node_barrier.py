"""A barrier of one node's ranks before MPI starts.

In MPI_Init Open MPI waits for the other ranks by looking 10,000 times a second, 3 % of a core for each rank
that waits: 64 ranks that start on few cores spend most of their time on it. Here they sleep in the kernel. It
only saves time: where it can't be made, or a rank does not come, MPI_Init does the waiting.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable

_PATIENCE_S = 2.0  # nobody has come for so long: don't wait for the rest, which may be another program's
_RETRY_S = 0.005


def wait_for_node() -> None:
    """Wait until all ranks that Open MPI's mpirun has started on this node have come here."""
    namespace, size = os.environ.get("PMIX_NAMESPACE"), os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "")
    if namespace and size.isdecimal():
        meet(f"mpillm-start-{namespace}", int(size))


def meet(name: str, n: int) -> None:
    """Return when `n` callers have given this name, in this network namespace.

    The first one counts the others, who hold a connection to it until it closes them all: when all are there,
    when nobody has come for `_PATIENCE_S`, or when it dies.
    """
    address = f"\0{name}".encode()
    end = time.monotonic() + _PATIENCE_S
    with socket.socket(socket.AF_UNIX) as mine:
        while time.monotonic() < end:
            if _succeeds(mine.bind, address):
                mine.listen(n)
                _count(mine, n - 1)
                return
            if _succeeds(mine.connect, address):
                # The first one's patience, and the deadline of MPI's start, bound this wait. A caller that it
                # has not seen when it closes is reset.
                with contextlib.suppress(OSError):
                    mine.recv(1)
                return
            time.sleep(_RETRY_S)  # the first one does not listen yet


def _count(listener: socket.socket, n: int) -> None:
    listener.settimeout(_PATIENCE_S)
    others: list[socket.socket] = []
    with contextlib.suppress(OSError):  # the rest does not come in time, or no file descriptor is left
        while len(others) < n:
            others.append(listener.accept()[0])
    for other in others:
        other.close()


def _succeeds(act: Callable[[bytes], None], address: bytes) -> bool:
    with contextlib.suppress(OSError):
        act(address)
        return True
    return False
