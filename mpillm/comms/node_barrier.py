"""A barrier of one node's ranks before MPI starts.

In MPI_Init Open MPI waits for the other ranks by looking 10,000 times a second, 3 % of a core for each rank
that waits: 64 ranks that start on few cores spend most of their time on it. Here they sleep in the kernel. It
only saves time: where it can't be made, or a rank does not come, MPI_Init does the waiting.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable

from launch.outside import whole_number

_PATIENCE_S = 2.0  # nobody has come for so long: don't wait for the rest, which may be another program's
_RETRY_S = 0.005
_UID = struct.Struct("iII")  # SO_PEERCRED: pid, uid, gid


def wait_for_node() -> None:
    """Wait until all ranks that Open MPI's mpirun has started on this node have come here."""
    namespace = os.environ.get("PMIX_NAMESPACE")
    size = whole_number(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", ""))
    if namespace and size is not None:
        meet(f"mpillm-start-{namespace}", size)


def meet(name: str, n: int, patience_s: float = _PATIENCE_S) -> None:
    """Return when `n` callers of this user have given this name, in this network namespace.

    The first one counts the others, who hold a connection to it until it closes them all: when all are there,
    when nobody has come for `patience_s`, or when it dies. Other users may have the name, or come: they
    count for nothing. Whatever happens, it takes no longer than `n` callers may.
    """
    address = f"\0{name}".encode()
    end = time.monotonic() + patience_s
    with socket.socket(socket.AF_UNIX) as mine:
        while time.monotonic() < end:
            if _succeeds(mine.bind, address):
                mine.listen(n)
                _count(mine, n - 1, patience_s)
                return
            if _succeeds(mine.connect, address):
                # A caller that the first one has not seen when it closes is reset.
                if _is_ours(mine):
                    mine.settimeout(patience_s * n)
                    with contextlib.suppress(OSError):
                        mine.recv(1)
                return
            time.sleep(_RETRY_S)  # the first one does not listen yet


def _count(listener: socket.socket, n: int, patience_s: float) -> None:
    others: list[socket.socket] = []
    end = time.monotonic() + patience_s
    with contextlib.suppress(OSError):  # the rest does not come in time, or no file descriptor is left
        while len(others) < n and (left := end - time.monotonic()) > 0:
            listener.settimeout(left)
            other = listener.accept()[0]
            if _is_ours(other):
                others.append(other)
                end = time.monotonic() + patience_s
            else:
                other.close()
    for other in others:
        other.close()


def _is_ours(other: socket.socket) -> bool:
    """Return whether the process at the other end is this user's."""
    _, uid, _ = _UID.unpack(other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UID.size))
    return bool(uid == os.getuid())


def _succeeds(act: Callable[[bytes], None], address: bytes) -> bool:
    with contextlib.suppress(OSError):
        act(address)
        return True
    return False
