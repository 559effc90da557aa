"""Under Slurm's PMIx a rank's connections outlive it by some seconds.

Slurm's PMIx server ends the whole step, with SIGKILL, as soon as a connection to a rank has ended, or another
rank of Open MPI reports that one of its own has: often before rank 0 has named who is lost. So a process that
shares the rank's file descriptors keeps its connections open until the step has ended. It hangs up at once on
the rank's lifeline, by which rank 0 hears of the loss, and lets go of all that is no connection. If rank 0
does not end the run, Slurm does, when the time is up. Rank 0 has one, too: the others hear of its loss by the
lifelines that end there, and one of them says so (see `report.afterwards`). Until all have joined, rank 0
does not know the others' processes: nothing is kept then, and srun's own words name who is lost.

Once the last task of a node has ended, Slurm kills what is left there, such processes, too. So the task that
Slurm knows is not the rank but its parent, which does nothing but end as the rank has, once rank 0 has ended,
too: by then all is said.
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
import sys
import time

from launch.launcher import find_launcher
from launch.prctl import KEEPER, die_with_parent, name_process
from launch.siblings import runs
from launch.signals import stop_signals

_KEPT_S = 10.0
_LAST_WORDS_S = 3.0  # rank 0 has ended without any: another rank says so
_THEN_S = 1.0  # the step has ended on this node, but on rank 0's it has not
_LOOK_S = 0.05
_CLONE_FILES = 0x400
_CLONE = {"x86_64": 56, "aarch64": 220}  # the system call's number
_WAKE = signal.SIGUSR1
# The process; whether all have joined; what ends with rank 0; the port of the others' lifelines.
_STATE = struct.Struct("i?ii")
_OVER = _STATE.size  # a byte: whether the task may end


class KeptConnections:
    """The rank's end. Only its main thread may make one, before there are others."""

    def __init__(self) -> None:
        """Start the process. Raises OSError if the system can't."""
        number = _CLONE.get(platform.machine())
        if number is None:
            raise OSError(f"no clone on {platform.machine()}")
        self._shared = mmap.mmap(-1, _STATE.size + 1)
        if not _has_started_mpi():
            self._be_the_child()
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
        _STATE.pack_into(self._shared, 0, pid, False, -1, 0)

    def keep(self, rank0: int, port: int) -> None:
        """From now on keep all connections but those to this port, as soon as the rank has ended, until rank
        0 has: `rank0` is its pidfd, or the lifeline."""
        _STATE.pack_into(self._shared, 0, self._pid, True, rank0, port)

    def let_task_end(self) -> None:
        """Let the task end with the rank: it is rank 0, and has said all."""
        self._shared[_OVER] = 1

    def end(self) -> None:
        """End the process: the rank takes its leave in an orderly way."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0

    def _be_the_child(self) -> None:
        """Go on as a child of this process, which stays Slurm's task."""
        rank = os.fork()
        if rank == 0:
            die_with_parent(signal.SIGKILL)
            return
        name_process(KEEPER)
        for number in stop_signals():  # Slurm sends them to all processes of a task
            signal.signal(number, signal.SIG_IGN)
        ended = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
        kept, *_ = _STATE.unpack_from(self._shared)
        end = time.monotonic() + _KEPT_S + _LAST_WORDS_S
        while kept and runs(kept) and not self._shared[_OVER] and time.monotonic() < end:
            time.sleep(_LOOK_S)
        if ended < 0:
            if -ended in stop_signals():
                signal.signal(-ended, signal.SIG_DFL)
            os.kill(os.getpid(), -ended)
        os._exit(abs(ended))

    def _keep(self, rank: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [_WAKE])
        name_process(KEEPER)
        die_with_parent(_WAKE)
        while os.getppid() == rank:
            signal.sigwait([_WAKE])
        _, joined, rank0, port = _STATE.unpack_from(self._shared)
        if not joined:
            return
        is_late = rank0 < 0  # whether rank 0 had ended by then; here it is this one
        ends, step = select.poll(), select.poll()
        for fd in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
            with contextlib.suppress(OSError):  # the folder's own, which is closed by now
                is_socket = os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")  # noqa: PTH115
                if fd == rank0:
                    is_late = _has_ended(fd)
                    ends.register(fd, select.POLLIN | select.POLLRDHUP)
                    if is_socket:
                        _hang_up(fd)
                elif not is_socket or (port and _port(fd) == port):
                    os.close(fd)
                elif _is_to_pmix(fd):
                    ends.register(fd, select.POLLRDHUP)
                    step.register(fd, select.POLLRDHUP)
        if not self._shared[_OVER]:
            if not is_late:
                ends.poll(_KEPT_S * 1000)
            else:
                step.poll(_LAST_WORDS_S * 1000)
            self._shared[_OVER] = 1
        step.poll(_KEPT_S * 1000)
        time.sleep(_THEN_S)


def _has_ended(fd: int) -> bool:
    """Return whether the process of a pidfd, or at the other end of a connection, has ended."""
    now = select.poll()
    now.register(fd, select.POLLIN | select.POLLRDHUP)
    return bool(now.poll(0))


def _hang_up(fd: int) -> None:
    """Have the other end of a connection hear that this one has ended, and go on to hear of its end."""
    with socket.socket(fileno=os.dup(fd)) as one:
        one.shutdown(socket.SHUT_WR)


def _has_started_mpi() -> bool:
    """Return whether the program that calls mpillm has: it can't become another process then."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and bool(mpi.Is_initialized())


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


def keep(rank0: int = -1, port: int = 0) -> None:
    """Keep them from now on: rank 0 knows this rank.

    `rank0`: the lifeline to it, or a pidfd. `port`: on rank 0, where the lifelines of the others end.
    """
    if _kept is not None:
        _kept.keep(rank0, port)


def keep_while(rank0: int) -> None:
    """Keep them from now on: rank 0 is this process, of this host."""
    if _kept is not None:
        _kept.keep(os.pidfd_open(rank0), 0)


def have_said_all() -> None:
    """Note that rank 0 is about to end a run in which a rank was lost."""
    if _kept is not None:
        _kept.let_task_end()


def take_leave() -> None:
    """Note that this rank has left MPI in an orderly way: nothing is kept."""
    if _kept is not None:
        _kept.end()
