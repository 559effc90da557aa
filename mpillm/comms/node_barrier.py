"""Barrier of a node's ranks before MPI starts.

In MPI_Init, Open MPI waits for the other ranks by polling 10,000 times a second, which takes 3 % of a CPU
core for each waiting rank. If 64 ranks start on few cores, this polling takes most of their time. In this
barrier, ranks sleep in the kernel. The barrier only saves time: if it fails, or if a rank does not arrive,
MPI_Init waits.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable

from launch.safe_text import whole_number

_PATIENCE_S = 2.0  # longest time without an arrival: missing ranks may run another program
_RETRY_S = 0.005
_UID = struct.Struct("iII")  # SO_PEERCRED: pid, uid, gid


def wait_for_node() -> None:
    """Wait until all ranks that Open MPI's mpirun has started on this node have called this."""
    namespace = os.environ.get("PMIX_NAMESPACE")
    size = whole_number(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", ""))
    if namespace and size is not None:
        meet(f"mpillm-start-{namespace}", size)


def meet(name: str, n: int, patience_s: float = _PATIENCE_S, uid: int = os.getuid()) -> None:
    """Wait until `n` processes of user `uid` have called this with the same name in this network namespace.

    The first process counts the others, which are connected to it. It closes all connections when all others
    have arrived, when none has arrived for `patience_s`, or when it exits. Processes of other users do not
    count.
    The wait takes at most `n * patience_s`.
    """
    address = f"\0{name}".encode()
    end = time.monotonic() + patience_s
    with socket.socket(socket.AF_UNIX) as own:
        while time.monotonic() < end:
            if _succeeds(own.bind, address):
                own.listen(n)
                _count(own, n - 1, patience_s, uid)
                return
            if _succeeds(own.connect, address):
                # If the first process closes its socket before it accepts, the connection is reset.
                if _uid_of(own) == uid:
                    own.settimeout(patience_s * n)
                    with contextlib.suppress(OSError):
                        own.recv(1)
                return
            time.sleep(_RETRY_S)  # the first process does not listen yet


def _count(listener: socket.socket, n: int, patience_s: float, uid: int) -> None:
    others: list[socket.socket] = []
    end = time.monotonic() + patience_s
    with contextlib.suppress(OSError):  # the others do not arrive in time, or no file descriptor is left
        while len(others) < n and (left := end - time.monotonic()) > 0:
            listener.settimeout(left)
            other = listener.accept()[0]
            if _uid_of(other) == uid:
                others.append(other)
                end = time.monotonic() + patience_s
            else:
                other.close()
    for other in others:
        other.close()


def _uid_of(other: socket.socket) -> int:
    """Return the user of the process at the other end."""
    _, uid, _ = _UID.unpack(other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UID.size))
    return int(uid)


def _succeeds(act: Callable[[bytes], None], address: bytes) -> bool:
    with contextlib.suppress(OSError):
        act(address)
        return True
    return False
