"""Under Slurm's PMIx a rank's connections outlive it by some seconds.

Slurm's PMIx server ends the whole step, with SIGKILL, as soon as a connection to a rank has ended, or another
rank of Open MPI reports that one of its own has: often before rank 0 has named who is lost. So a process that
shares the rank's file descriptors keeps its connections open until the step has ended. It lets go at once of
the rank's lifeline, by which rank 0 hears of the loss, and of all that is no connection. If rank 0 does not
end the run, Slurm does, when the time is up. Rank 0 has one, too: the others hear of its loss by the
lifelines that end there, and one of them says so (see `report.afterwards`). Until all have joined, rank 0
does not know the others' processes: nothing is kept then, and srun's own words name who is lost.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import mmap
import os
import platform
import select
import signal
import socket
import struct
import time

from launch.launcher import find_launcher
from launch.prctl import die_with_parent, name_process

NAME = "mpillm-kept"
"""What the system calls the process: it has the rank's command line."""

_KEPT_S = 10.0
_THEN_S = 1.0  # the step has ended on this node, whose last rank it was, but rank 0's has not
_CLONE_FILES = 0x400
_CLONE = {"x86_64": 56, "aarch64": 220}  # the system call's number
_WAKE = signal.SIGUSR1
_STATE = struct.Struct("?ii")  # whether all have joined, the lifeline, and the port of the others'


class KeptConnections:
    """The rank's end. Only its main thread may make one, before there are others."""

    def __init__(self) -> None:
        """Start the process. Raises OSError if the system can't."""
        number = _CLONE.get(platform.machine())
        if number is None:
            raise OSError(f"no clone on {platform.machine()}")
        self._shared = mmap.mmap(-1, _STATE.size)
        rank = os.getpid()
        libc = ctypes.CDLL(None, use_errno=True)
        zeros = [ctypes.c_long(0)] * 4
        pid = libc.syscall(ctypes.c_long(number), ctypes.c_long(_CLONE_FILES | signal.SIGCHLD), *zeros)
        if pid < 0:
            raise OSError(ctypes.get_errno(), "clone")
        if pid == 0:
            try:
                self._keep(rank)
            finally:
                os._exit(0)
        self._pid = pid

    def keep(self, lifeline: int, port: int) -> None:
        """From now on keep all connections but this one, and those to this port, as soon as the rank has
        ended."""
        _STATE.pack_into(self._shared, 0, True, lifeline, port)

    def end(self) -> None:
        """End the process: the rank takes its leave in an orderly way."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0

    def _keep(self, rank: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [_WAKE])
        name_process(NAME)
        die_with_parent(_WAKE)
        while os.getppid() == rank:
            signal.sigwait([_WAKE])
        joined, lifeline, port = _STATE.unpack_from(self._shared)
        if not joined:
            return
        step = select.poll()
        for fd in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
            with contextlib.suppress(OSError):  # the folder's own, which is closed by now
                is_socket = os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")  # noqa: PTH115
                if fd == lifeline or not is_socket or (port and _port(fd) == port):
                    os.close(fd)
                elif _is_to_pmix(fd):
                    step.register(fd, select.POLLRDHUP)
        step.poll(_KEPT_S * 1000)
        time.sleep(_THEN_S)


def _port(fd: int) -> int:
    """Return a socket's own port; 0 if it has none."""
    with socket.socket(fileno=os.dup(fd)) as one:
        name = one.getsockname()
    return int(name[1]) if isinstance(name, tuple) and len(name) > 1 else 0


def _is_to_pmix(fd: int) -> bool:
    """Return whether a socket is connected to the server that started this rank."""
    with socket.socket(fileno=os.dup(fd)) as one:
        try:
            peer = one.getpeername()
        except OSError:  # it is connected to nobody
            return False
    server = f"://{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "none"
    return any(name.startswith("PMIX_SERVER_URI") and server in uri for name, uri in os.environ.items())


_kept: KeptConnections | None = None


def ends_with_a_rank() -> bool:
    """Return whether the launcher ends the run in a moment when a rank is lost: Slurm with PMIx."""
    launcher = find_launcher()
    return launcher is not None and launcher.is_srun and launcher.protocol == "PMIx"


def prepare() -> None:
    """Prepare to keep this rank's connections open after its end, if its launcher makes that necessary."""
    global _kept
    if _kept or not ends_with_a_rank():
        return
    try:
        _kept = KeptConnections()
    except OSError:  # then Slurm may be faster than rank 0
        return
    atexit.register(take_leave)


def keep(lifeline: int = -1, port: int = 0) -> None:
    """Keep them from now on, except for this one: rank 0 knows this rank.

    `port`: on rank 0, where the lifelines of the others end.
    """
    if _kept is not None:
        _kept.keep(lifeline, port)


def take_leave() -> None:
    """Note that this rank has left MPI in an orderly way: nothing is kept."""
    if _kept is not None:
        _kept.end()
