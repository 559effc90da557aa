"""Parent process of a server: ``python server_guard.py GRACE COMMAND…`` ends the server and its descendants.

Standard input is a socket to the owner. It closes when the owner ends the server or is killed. Then the
server gets SIGTERM, and after GRACE seconds all its descendants are killed. If the owner sends a number, it
replaces GRACE.

The owner receives ``started PID``, ``shared NAME`` for a file in /dev/shm that the server has created, and
``ended CODE`` (negative: a signal) when the server's first process has exited.

This process adopts orphans (Linux), so it also ends the processes that an exited server leaves. Then it
removes the remaining shared memory of the server.

This file is run by path with ``python -I -S``. It imports no module of mpillm, and starts in about 10 ms.
"""

# pathlib takes time to import.
# ruff: noqa: PTH108, PTH116, PTH123, PTH208
from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
AFTER_S = 2.0  # time for processes that a server leaves after its own exit
LOOK_S = 0.05
SHM = "/dev/shm"
SHM_S = 0.2  # time between two looks at /dev/shm
SHM_LOOKS = 10  # so often, the server's processes are searched for one that has mapped a new file
MAX_READ = 4096  # bytes
# SIGCHLD, and `launch.signals.stop_signals`: a batch system sends these to every process of a job.
HANDLED = (
    signal.SIGCHLD,
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def main(grace: str, command: list[str]) -> None:
    """Run `command` until it or the owner ends, and end the remaining processes."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    owner = os.dup(0)  # the server does not inherit the copy
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    wakeups, wakeup_end = os.pipe()
    os.set_blocking(wakeup_end, False)
    signal.set_wakeup_fd(wakeup_end)
    for number in HANDLED:
        signal.signal(number, lambda _number, _frame: None)
    shared = _SharedMemory(owner)
    child = _start(libc, command)
    _send(owner, f"started {child}")
    code, grace_s = None, float(grace)
    while code is None:
        ready = select.select([owner, wakeups], [], [], SHM_S)[0]
        shared.look()
        if wakeups in ready:
            os.read(wakeups, MAX_READ)
            code = _reap(child)
        if owner in ready:
            numbers = _read(owner)
            if not numbers:
                break
            grace_s = float(numbers[-1])
    if code is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM)
        stop_at = time.monotonic() + grace_s
        while code is None and time.monotonic() < stop_at:
            time.sleep(LOOK_S)
            code = _reap(child)
    shared.look()
    _send(owner, f"ended {-signal.SIGKILL if code is None else code}")
    _end_all(0 if code is None else AFTER_S)
    shared.remove()


class _SharedMemory:
    """Files of the server's processes in /dev/shm. A killed process cannot remove them."""

    def __init__(self, owner: int) -> None:
        self._owner = owner
        self._looks_left = dict.fromkeys(os.listdir(SHM), 0)  # by file
        self._inodes: dict[str, str] = {}  # inodes of the server's files, by name

    def look(self) -> None:
        names = os.listdir(SHM)
        self._looks_left = {name: self._looks_left.get(name, SHM_LOOKS) for name in names}
        if not any(left for name, left in self._looks_left.items() if name not in self._inodes):
            return  # reading maps takes time, and blocks mmap in the server
        for pid in _below(os.getpid()):
            for name, inode in _mapped(pid).items():
                if self._looks_left.get(name) and name not in self._inodes:
                    self._inodes[name] = inode
                    _send(self._owner, f"shared {name}")
        self._looks_left = {name: max(0, left - 1) for name, left in self._looks_left.items()}

    def remove(self) -> None:
        """Remove the remaining files that no process has mapped."""
        left = set()
        for name, inode in self._inodes.items():
            with contextlib.suppress(OSError):
                status = os.stat(f"{SHM}/{name}")
                if str(status.st_ino) == inode and status.st_uid == os.geteuid():
                    left.add(name)
        for pid in _pids() if left else ():
            left -= _mapped(pid).keys()
        for name in left:
            with contextlib.suppress(OSError):
                os.unlink(f"{SHM}/{name}")


def _mapped(pid: int) -> dict[str, str]:
    """Return the inodes of a process's writable shared mappings of files in /dev/shm, by name."""
    inodes = {}
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as file:
        for line in file:
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[1] == "rw-s" and fields[5].startswith(f"{SHM}/"):
                inodes[fields[5][len(SHM) + 1 :].rstrip("\n")] = fields[4]
    return inodes


def _start(libc: ctypes.CDLL, command: list[str]) -> int:
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    for number in HANDLED:
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"can't start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


def _end_all(grace_s: float) -> None:
    """End all descendants of this process by SIGTERM, and after `grace_s` by SIGKILL."""
    kill_at = time.monotonic() + grace_s
    terminated = False
    while pids := _below(os.getpid()):
        late = time.monotonic() >= kill_at
        if late or not terminated:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
            terminated = True
        time.sleep(LOOK_S)
        _reap(0)


def _reap(child: int) -> int | None:
    """Reap all exited processes; return the exit code of `child` if it has exited (negative: a signal)."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while (result := os.waitpid(-1, os.WNOHANG))[0]:
            if result[0] == child:
                code = os.waitstatus_to_exitcode(result[1])
    return code


def _below(pid: int) -> list[int]:
    """Return all descendants of `pid`, parents before children."""
    children: dict[int, list[int]] = {}
    for one in _pids():
        with contextlib.suppress(OSError, ValueError):
            with open(f"/proc/{one}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(one)
    below = list(children.get(pid, ()))
    for one in below:  # the list grows during the loop
        below += children.get(one, ())
    return below


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _read(owner: int) -> list[bytes]:
    try:
        return os.read(owner, MAX_READ).split()
    except OSError:  # the owner was killed with unread data
        return []


def _send(owner: int, text: str) -> None:
    with contextlib.suppress(OSError):  # the owner has exited
        os.write(owner, os.fsencode(text))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
