"""A server or another program that this process owns. It ends with this process, whatever the reason.

    server = OwnedServer(command, log, wake)
    …
    if why := server.ended():  # one of its processes has exited or was stopped
        …
    server.stop(grace_s)

`server_guard` runs between the two processes. A thread watches every process of the server for its exit and
the signal that caused it. Linux only.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from launch import run_folders
from launch.children import tail
from launch.command import Command
from launch.environment import environment_of_this_node
from launch.exits import how_ended
from launch.first_failure import failing_lines
from launch.masking import without_known_bytes
from launch.shared_files import SHM

_PIECE = 1 << 20  # bytes of a log in memory
_LOOK_S = 0.2
_STOPPED_S = 0.6  # a debugger, or a tool that takes a snapshot, may stop a process for a moment
_KILL_S = 5.0  # for the guard to end what does not end by itself
# By these no process ends on purpose; a server ends its pool of compilers by SIGTERM, for one.
_FATAL = (
    *(signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT),
    *(signal.SIGILL, signal.SIGFPE, signal.SIGSYS),
)
_BEFORE_S = 5.0  # what ended so shortly before the whole server is told with its end
SEARCHED = 4000  # lines of a log, for a known failure
_LARGE = 256 << 20  # bytes in memory of a process that a server which is ready can't do without
_MOST = 4096  # bytes of a message of the guard
_GUARD = Path(__file__).parent / "server_guard.py"


@dataclass
class _Process:
    pid: int
    fd: int  # a pidfd
    name: str
    resident: int  # bytes, when it was last looked at
    was_large: bool = False  # ever: one that ends gives its memory back before it has ended
    stopped_at: float | None = None  # since when it is

    def __str__(self) -> str:
        return f"process {self.pid} ({self.name})"


class OwnedServer:
    """The processes of a server."""

    def __init__(
        self,
        command: Command,
        log: Path,
        wake: Callable[[], None] = lambda: None,
        grace_s: float = 10.0,
        most_bytes: float = math.inf,
        limited_by: str = "--server_memory_limit",
        outlives_s: float = 0.0,
        unshown: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start it; its output is appended to `log`. `wake`: called once, when `ended` has something to say.

        `grace_s`: what it gets to end by itself if this process is killed; `most_bytes`: of memory that its
        processes may hold together, as the option `limited_by` says. `outlives_s`: how long it may go on
        after one of them was killed: it may do so to its own, at its end. `unshown`: of its environment, and
        not written to the log. Raises OSError if the log can't be written.
        """
        self.log = log
        self._begin = _size(log)  # of its lines, or of those since it is ready, in the log
        self._wake = wake
        self._most_bytes, self._limited_by = most_bytes, limited_by
        self._outlives_s = outlives_s
        self._lost: tuple[str, float] | None = None  # of its processes, and when
        self.code: int | None = None  # its first process's, once that has ended
        self.cpu_s = 0.0  # of its processes that run
        self._why = ""
        self._stopping = False
        self._needed: frozenset[int] = frozenset()  # its processes, as it became ready
        self._first: int | None = None  # the server's first process
        self._processes: dict[int, _Process] = {}
        self._gone: tuple[float, str] = 0.0, ""  # when the first of some others ended, and how
        self._shared: set[str] = set()  # files in /dev/shm that it has made
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, log.open("ab") as output:
            output.write(f"$ {command}\n".encode())
            output.flush()
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_GUARD), str(grace_s), *command.argv],
                env={**environment_of_this_node(os.environ), **command.env, **unshown},
                stdin=theirs.fileno(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a launcher that ends this process's group leaves the guard alone
            )
        self._over = _Process(self._guard.pid, -1, "what stands over it", 0)
        self._watcher = threading.Thread(target=self._watch, name=f"watch {log.stem}", daemon=True)
        self._watcher.start()

    @property
    def pids(self) -> list[int]:
        """Its processes, as they were last seen."""
        return list(self._processes)

    def ready(self) -> None:
        """Note that it is ready: from now on it can't do without its large processes.

        What it starts later, such as a compiler, may end.
        """
        self._needed = frozenset(self._processes)
        self._begin = _size(self.log)

    def ended(self) -> str:
        """Return why it does not run any more: what has ended, and how; "" while it does."""
        return self._why

    def tail(self, lines: int = 15) -> str:
        """Return the last lines of its log, indented."""
        return tail(self.log, lines)

    def silent_s(self) -> float:
        """Return how long it has written nothing to its log; 0 if that is gone."""
        try:
            return max(0.0, time.time() - self.log.stat().st_mtime)
        except OSError:
            return 0.0

    def cause(self, who: str, what: str, explain: Callable[[str], str]) -> str:
        """Return a failure's cause: what has happened to it, what that means, and the end of its log.

        `explain`: what a line of a log means; "" if none is known.
        """
        known, end = explain(self.tail(SEARCHED)), self.tail()
        failures = [f"  | {line}" for line in failing_lines(self.log, self._begin) if line not in end]
        lines = [f"{who}: {what}", *([known] if known else [])]
        lines += [f"failures in {self.log}, the first ones:", *failures] if failures else []
        return "\n".join([*lines, f"the end of {self.log}:", end])

    def stop(self, grace_s: float) -> None:
        """End it and all that it has started: by SIGTERM, after `grace_s` by force. Return when it has."""
        if self._stopping:
            return
        self._stopping = True
        with contextlib.suppress(OSError):  # the guard has ended
            self._guard.send_signal(signal.SIGCONT)
            self._line.sendall(f"{grace_s:g}\n".encode())
        self._watcher.join(_KILL_S)
        self._line.close()
        try:
            self._guard.wait(grace_s + _KILL_S)
        except subprocess.TimeoutExpired:  # something hangs in the kernel
            self._guard.kill()
        self._kill_left()
        run_folders.sweep()
        with contextlib.suppress(OSError):  # a full disk, say
            _mask_log(self.log)
        if self._guard.poll() != 0:  # it was killed, and has not tidied up
            for name in self._shared:
                with contextlib.suppress(OSError):
                    (SHM / name).unlink()

    # --- the watcher's thread, until `stop` ---

    def _watch(self) -> None:
        while not self._stopping and not self._why:
            try:
                why = self._look()
            except OSError:  # out of files, say: the guard still tells
                why = ""
                time.sleep(_LOOK_S)
            if why and not self._stopping:
                self._why = why
                self._wake()

    def _look(self) -> str:
        """Wait a moment for something to end; return what it is, or what is stopped."""
        self._find()
        by_fd = {process.fd: process for process in self._processes.values()}
        line = self._line.fileno()
        ready = select.select([line, *by_fd], [], [], _LOOK_S)[0]
        # Of those that end together, what others have started comes first.
        ended = [self._taken(by_fd[fd]) for fd in reversed(ready) if fd in by_fd]
        others = [text for process, text, _ in ended if process.pid != self._first]
        now = time.monotonic()
        if others and now - self._gone[0] > _BEFORE_S:
            self._gone = now, others[0]
        if line in ready and (why := self._told()):
            # What ended first says more than that the server then gave up.
            killed = next((text for process, text, bad in ended if bad and process.pid != self._first), "")
            if self.code == 0 and self._outlives_s:
                return why
            return killed or self._told_lost() or self._after(why)
        for process, text, bad in ended:
            is_needed = process.pid in self._needed and process.was_large
            if process.pid != self._first and (bad or is_needed):
                # What ended before it, and was small, may be why.
                text = text if bad or self._gone[1] == text else f"{self._gone[1]}, then {text}"
                if not self._outlives_s:
                    return text
                self._lost = self._lost or (text, time.monotonic())
        late = self._lost is not None and time.monotonic() - self._lost[1] > self._outlives_s
        return (self._told_lost() if late else "") or self._stopped() or self._too_large()

    def _after(self, why: str) -> str:
        """Return how the server ended, after what else of it had just ended.

        Its parent may have asked how that did, so that nobody else learns it, and it may be small. But a
        server that has got a deadly signal may itself start something, to write where it was.
        """
        at, text = self._gone
        if self.code is None or not text or time.monotonic() - at > _BEFORE_S:
            return why
        return f"{why}; shortly before, {text}" if -self.code in _FATAL else f"{text}, then the server {why}"

    def _told_lost(self) -> str:
        return self._lost[0] if self._lost else ""

    def _told(self) -> str:
        """Read what the guard says; return how the server ended, if it has."""
        words = self._line.recv(_MOST).split(maxsplit=1)  # of one message
        if not words:
            self._kill_left()
            return f"its guard (pid {self._guard.pid}) has ended"
        what, value = words
        if what == b"shared":
            self._shared.add(os.fsdecode(value))
        elif what == b"started":
            self._first = int(value)
        if what != b"ended":
            return ""
        self.code = code = int(value)
        return how_ended(code)

    def _find(self) -> None:
        """Begin to look after the processes that were not there at the last look."""
        for pid in _below(self._guard.pid):
            if pid not in self._processes:
                with contextlib.suppress(ProcessLookupError):
                    self._processes[pid] = _Process(pid, os.pidfd_open(pid), _name(pid) or "starting", 0)

    def _taken(self, process: _Process) -> tuple[_Process, str, bool]:
        """Forget a process that has ended; return how it did, and whether that is bad for any server."""
        status = _exit_status(process.pid)
        del self._processes[process.pid]
        os.close(process.fd)
        number = os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else 0
        how = how_ended(-number) if number else "has ended"
        return process, f"{process} {how}", number in _FATAL

    def _stopped(self) -> str:
        now, ticks = time.monotonic(), 0
        for process in (self._over, *self._processes.values()):
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = _stat(process.pid)
                process.resident = int(fields[21]) * _PAGE
                process.was_large |= process.resident >= _LARGE
                if process is not self._over:
                    ticks += int(fields[11]) + int(fields[12])
                    process.name = _name(process.pid) or process.name  # it may give itself another one
                if fields[0] not in ("T", "t"):
                    process.stopped_at = None
                elif process.stopped_at is None:
                    process.stopped_at = now
                elif now - process.stopped_at >= _STOPPED_S:
                    return f"{process} is stopped: kill -CONT {process.pid}"
        self.cpu_s = ticks / _TICKS_PER_S
        return ""

    def _too_large(self) -> str:
        held = sum(process.resident for process in self._processes.values())
        if held <= self._most_bytes:
            return ""
        largest = max(self._processes.values(), key=lambda process: process.resident)
        return f"holds {held / _GIB:.3g} GiB of memory, more than {self._limited_by}; most of it {largest}"

    def _kill_left(self) -> None:
        for process in self._processes.values():
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(process.fd, signal.SIGKILL)
            os.close(process.fd)
        self._processes = {}


_GIB = 1 << 30
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def _size(log: Path) -> int:
    return log.stat().st_size if log.is_file() else 0


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third, its state, on."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def _exit_status(pid: int) -> int | None:
    """Return the status of a process that has ended, as wait gives it, if its parent has not asked yet."""
    try:
        fields = _stat(pid)
        return int(fields[49]) if fields[0] in ("Z", "X") else None
    except (OSError, ValueError, IndexError):
        return None


def _name(pid: int) -> str:
    """Return how a process calls itself, shortened; "" before it does, and after its end."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return " ".join(filter(None, [Path(words[0]).name, *words[1:3]]))[:40]
    except OSError:
        return ""


def _below(pid: int) -> Iterator[int]:
    """Yield the processes below `pid`."""
    for task in _tasks(pid):
        with contextlib.suppress(OSError):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                yield int(child)
                yield from _below(int(child))


def _tasks(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 - names, not paths
    except OSError:
        return []


def _mask_log(log: Path) -> None:
    """Overwrite the secrets that a program has printed: vLLM prints its options. Raises OSError."""
    with log.open("r+b") as file:
        while data := file.read(_PIECE):
            data += file.readline(_PIECE)
            if (shown := without_known_bytes(data)) != data:
                file.seek(-len(data), os.SEEK_CUR)
                file.write(shown)
