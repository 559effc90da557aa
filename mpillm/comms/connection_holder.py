"""Connection holder: under Slurm's PMIx, a rank's connections outlive the rank by some seconds.

Slurm's PMIx server kills the whole step as soon as a connection to a rank closes, or another rank of Open MPI
reports a closed connection. Often, rank 0 has no time to name the lost rank. So a holder process, which
shares the rank's file descriptors, keeps the rank's connections open until the step has ended. When the rank
exits, the holder immediately shuts down the rank's liveness connection, by which rank 0 detects the loss. The
holder also closes all files that are not connections. If rank 0 does not end the run, Slurm ends the run
after a limited time.

Rank 0 also has a holder: the other ranks detect the loss of rank 0 by their liveness connections, and one of
them reports the loss (see `report.postmortem`). Until all ranks have joined, rank 0 cannot identify the
others' processes. So nothing is held until then, and srun's own message names a lost rank.

When the last task of a node has ended, Slurm kills all processes that are left, holders included. So Slurm's
task is not the rank, but the rank's parent. The parent exits with the rank's status after rank 0 has exited.
By then, all messages are printed.
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

_HOLD_S = 10.0
_REPORT_S = 3.0  # time for another rank to report that rank 0 has exited without a message
_AFTER_STEP_S = 1.0  # after the step's end on this node: on rank 0's node, it may end later
_LOOK_S = 0.05
_CLONE_FILES = 0x400
_CLONE = {"x86_64": 56, "aarch64": 220}  # the system call's number
_WAKE = signal.SIGUSR1
# The holder's process id; whether all ranks have joined; file descriptor of rank 0 (pidfd or connection), or
# -1; on rank 0, port of the liveness connections, otherwise 0.
_STATE = struct.Struct("i?ii")
_MAY_END = _STATE.size  # offset of a byte: whether Slurm's task may end


class ConnectionHolder:
    """The rank's side. Create it in the main thread, before other threads start."""

    def __init__(self) -> None:
        """Start the holder process. Raises OSError if that fails."""
        number = _CLONE.get(platform.machine())
        if number is None:
            raise OSError(f"no clone on {platform.machine()}")
        self._shared = mmap.mmap(-1, _STATE.size + 1)
        if not _has_started_mpi():
            self._become_child()
        rank = os.getpid()
        libc = ctypes.CDLL(None, use_errno=True)
        zeros = [ctypes.c_long(0)] * 4
        pid = libc.syscall(ctypes.c_long(number), ctypes.c_long(_CLONE_FILES | signal.SIGCHLD), *zeros)
        if pid < 0:
            raise OSError(ctypes.get_errno(), "clone")
        if pid == 0:
            try:
                self._hold(rank)
            finally:
                os._exit(0)
        self._pid = pid
        _STATE.pack_into(self._shared, 0, pid, False, -1, 0)

    def hold(self, rank0: int, port: int) -> None:
        """When the rank exits, hold its connections until rank 0 exits. Called when all ranks have joined.

        `rank0`: rank 0's pidfd, or the liveness connection to it. `port`: local port whose connections are
        closed, not held.
        """
        _STATE.pack_into(self._shared, 0, self._pid, True, rank0, port)

    def let_task_end(self) -> None:
        """Let Slurm's task end with the rank: it is rank 0, and has printed all messages."""
        self._shared[_MAY_END] = 1

    def end(self) -> None:
        """End the holder process: the rank exits as planned."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0

    def _become_child(self) -> None:
        """Continue as a child of this process, which remains Slurm's task."""
        rank = os.fork()
        if rank == 0:
            die_with_parent(signal.SIGKILL)
            return
        name_process(KEEPER)
        for number in stop_signals():  # Slurm sends them to all processes of a task
            signal.signal(number, signal.SIG_IGN)
        status = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
        holder, *_ = _STATE.unpack_from(self._shared)
        end = time.monotonic() + _HOLD_S + _REPORT_S
        while holder and runs(holder) and not self._shared[_MAY_END] and time.monotonic() < end:
            time.sleep(_LOOK_S)
        if status < 0:
            if -status in stop_signals():
                signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)
        os._exit(abs(status))

    def _hold(self, rank: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [_WAKE])
        name_process(KEEPER)
        die_with_parent(_WAKE)
        while os.getppid() == rank:
            signal.sigwait([_WAKE])
        _, joined, rank0, port = _STATE.unpack_from(self._shared)
        if not joined:
            return
        is_late = rank0 < 0  # whether rank 0 has exited; true if this rank is rank 0
        ends, step = select.poll(), select.poll()
        for fd in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
            with contextlib.suppress(OSError):  # of the listed folder itself, closed by now
                is_socket = os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")  # noqa: PTH115
                if fd == rank0:
                    is_late = _has_exited(fd)
                    ends.register(fd, select.POLLIN | select.POLLRDHUP)
                    if is_socket:
                        _shut_down(fd)
                elif not is_socket or (port and _port(fd) == port):
                    os.close(fd)
                elif _is_to_pmix(fd):
                    ends.register(fd, select.POLLRDHUP)
                    step.register(fd, select.POLLRDHUP)
        if not self._shared[_MAY_END]:
            if not is_late:
                ends.poll(_HOLD_S * 1000)
            else:
                step.poll(_REPORT_S * 1000)
            self._shared[_MAY_END] = 1
        step.poll(_HOLD_S * 1000)
        time.sleep(_AFTER_STEP_S)


def _has_exited(fd: int) -> bool:
    """Return whether the process of a pidfd, or at the other end of a connection, has exited."""
    now = select.poll()
    now.register(fd, select.POLLIN | select.POLLRDHUP)
    return bool(now.poll(0))


def _shut_down(fd: int) -> None:
    """Report this rank's exit to a connection's other end. That end's exit can still be detected here."""
    with socket.socket(fileno=os.dup(fd)) as one:
        one.shutdown(socket.SHUT_WR)


def _has_started_mpi() -> bool:
    """Return whether the program that calls mpillm has started MPI. This process must then not fork."""
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
        except OSError:  # not connected
            return False
    server = f"://{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "none"
    return any(name.startswith("PMIX_SERVER_URI") and server in uri for name, uri in os.environ.items())


_holder: ConnectionHolder | None = None


def step_ends_with_a_rank() -> bool:
    """Return whether the launcher kills the run shortly after the loss of a rank: Slurm with PMIx."""
    launcher = find_launcher()
    return launcher is not None and launcher.is_srun and launcher.protocol == "PMIx"


def prepare() -> None:
    """Start the connection holder of this rank, if its launcher makes that necessary."""
    global _holder
    if _holder or not step_ends_with_a_rank():
        return
    try:
        _holder = ConnectionHolder()
    except OSError:  # without a holder, Slurm may end the run before rank 0 reports a loss
        return
    atexit.register(stop)


def hold(rank0: int = -1, port: int = 0) -> None:
    """Hold the connections after this rank's exit. Called when all ranks have joined.

    `rank0`: the liveness connection to rank 0, or rank 0's pidfd. `port`: see `ConnectionHolder.hold`.
    """
    if _holder is not None:
        _holder.hold(rank0, port)


def hold_until_exit(rank0: int) -> None:
    """Hold the connections after this rank's exit, until rank 0 exits. `rank0`: its pid on this host."""
    if _holder is not None:
        _holder.hold(os.pidfd_open(rank0), 0)


def let_task_end() -> None:
    """Let Slurm's task end with this rank, rank 0: a run that failed or lost a rank is about to end."""
    if _holder is not None:
        _holder.let_task_end()


def stop() -> None:
    """End the holder: this rank has left MPI as planned."""
    if _holder is not None:
        _holder.end()
