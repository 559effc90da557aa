"""Parent process of a server: ``python server_guard.py GRACE COMMAND…`` ends the server and its descendants.

Standard input is a socket to the owner. It closes when the owner ends the server or is killed. Then the
server gets SIGTERM, and after GRACE seconds all its descendants are killed. A line with a number changes
GRACE.

The owner receives ``started PID``, ``shared NAME`` for a file in /dev/shm that the server has created, and
``ended CODE`` (negative: a signal) when the server's first process has exited.

This process adopts orphans (Linux), so it also ends the processes that a dead server leaves, and removes the
rest of the server's shared memory.

It is run by path with ``python -I -S``. It imports no module of mpillm, and its start takes about 10 ms.
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
AFTER_S = 2.0  # for what a server leaves, once it has ended by itself
LOOK_S = 0.05
SHM = "/dev/shm"
SHM_S = 0.2  # between looks there
SHM_LOOKS = 10  # at the server's processes, for one that has mapped a new file
MOST = 4096  # bytes read from the owner at once
# With SIGCHLD, those of `launch.signals.stop_signals`: a batch system sends them to every process of a job.
OURS = (
    signal.SIGCHLD,
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def main(grace: str, command: list[str]) -> None:
    """Run `command` until it or the owner ends, and end what is left."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    owner = os.dup(0)  # not inherited
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    rings, bell = os.pipe()
    os.set_blocking(bell, False)
    signal.set_wakeup_fd(bell)
    for number in OURS:
        signal.signal(number, lambda _number, _frame: None)
    shared = _SharedMemory(owner)
    child = _start(libc, command)
    _tell(owner, f"started {child}")
    code, grace_s = None, float(grace)
    while code is None:
        ready = select.select([owner, rings], [], [], SHM_S)[0]
        shared.look()
        if rings in ready:
            os.read(rings, MOST)
            code = _reap(child)
        if owner in ready:
            words = _heard(owner)
            if not words:
                break
            grace_s = float(words[-1])
    if code is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM)
        stop_at = time.monotonic() + grace_s
        while code is None and time.monotonic() < stop_at:
            time.sleep(LOOK_S)
            code = _reap(child)
    shared.look()
    _tell(owner, f"ended {-signal.SIGKILL if code is None else code}")
    _end_all(0 if code is None else AFTER_S)
    shared.remove()


class _SharedMemory:
    """Files of the server's processes in /dev/shm. A killed process cannot remove them."""

    def __init__(self, owner: int) -> None:
        self._owner = owner
        self._left = dict.fromkeys(os.listdir(SHM), 0)  # looks at each file
        self._found: dict[str, str] = {}  # inodes of the server's

    def look(self) -> None:
        there = os.listdir(SHM)
        self._left = {name: self._left.get(name, SHM_LOOKS) for name in there}
        if not any(left for name, left in self._left.items() if name not in self._found):
            return  # reading maps costs, and keeps the server from mapping
        for pid in _below(os.getpid()):
            for name, inode in _mapped(pid).items():
                if self._left.get(name) and name not in self._found:
                    self._found[name] = inode
                    _tell(self._owner, f"shared {name}")
        self._left = {name: max(0, left - 1) for name, left in self._left.items()}

    def remove(self) -> None:
        """Remove what is left of it and nobody else has."""
        left = set()
        for name, inode in self._found.items():
            with contextlib.suppress(OSError):
                found = os.stat(f"{SHM}/{name}")
                if str(found.st_ino) == inode and found.st_uid == os.geteuid():
                    left.add(name)
        for pid in _pids() if left else ():
            left -= _mapped(pid).keys()
        for name in left:
            with contextlib.suppress(OSError):
                os.unlink(f"{SHM}/{name}")


def _mapped(pid: int) -> dict[str, str]:
    """Return the files right in /dev/shm that a process writes for others, with their inodes."""
    found = {}
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as file:
        for line in file:
            words = line.split(maxsplit=5)
            if len(words) == 6 and words[1] == "rw-s" and words[5].startswith(f"{SHM}/"):
                found[words[5][len(SHM) + 1 :].rstrip("\n")] = words[4]
    return found


def _start(libc: ctypes.CDLL, command: list[str]) -> int:
    me = os.getpid()
    child = os.fork()
    if child:
        return child
    for number in OURS:
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != me:
        os._exit(128 + signal.SIGKILL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"can't start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


def _end_all(grace_s: float) -> None:
    """End everything below this process: by SIGTERM, and after `grace_s` by force."""
    kill_at = time.monotonic() + grace_s
    asked = False
    while there := _below(os.getpid()):
        late = time.monotonic() >= kill_at
        if late or not asked:
            for pid in there:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
            asked = True
        time.sleep(LOOK_S)
        _reap(0)


def _reap(child: int) -> int | None:
    """Collect all that has ended; return the exit code of `child` if it has (negative: a signal)."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == child:
                code = os.waitstatus_to_exitcode(found[1])
    return code


def _below(pid: int) -> list[int]:
    """Return all processes below `pid`, each before those that it has started."""
    children: dict[int, list[int]] = {}
    for one in _pids():
        with contextlib.suppress(OSError, ValueError):
            with open(f"/proc/{one}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(one)
    below = list(children.get(pid, ()))
    for one in below:  # which grows
        below += children.get(one, ())
    return below


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _heard(owner: int) -> list[bytes]:
    try:
        return os.read(owner, MOST).split()
    except OSError:  # the owner has been killed with something unread
        return []


def _tell(owner: int, text: str) -> None:
    with contextlib.suppress(OSError):  # the owner has ended
        os.write(owner, os.fsencode(text))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
