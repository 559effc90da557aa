"""Server or other program that this process owns. It always ends when this process ends.

    server = OwnedServer(command, log, wake)
    …
    if why := server.ended():  # a process of the server has exited or was stopped
        …
    server.stop(grace_s)

`server_guard` is the parent process of the server, and a child of this process. A thread watches every
process of the server for its exit and the signal that caused it. Linux only.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from launch import run_folders
from launch.children import tail
from launch.command import Command
from launch.descendants import Descendants
from launch.environment import clean_environment, environment_of_this_node
from launch.exits import how_ended
from launch.first_failure import failing_lines
from launch.masking import without_known_bytes
from launch.readable import readable
from launch.shared_files import SHM

_PIECE = 1 << 20  # bytes of a log in memory
_LOOK_S = 0.2
_STOPPED_S = 0.6  # a debugger or a snapshot tool may stop a process for a moment
_MEASURING_SHARE = 0.1  # of the watcher's time: measuring memory takes about 15 ms for each GiB
_KILL_S = 5.0  # time for the guard to kill remaining processes
# These signals always mean a failure. SIGTERM is not among them: a server may end its compilers with it.
_FATAL = (
    *(signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT),
    *(signal.SIGILL, signal.SIGFPE, signal.SIGSYS),
)
_CAUSE_WINDOW_S = 5.0  # an earlier exit of another process did not cause the server's exit
SEARCHED = 4000  # last lines of a log that are searched for a known failure
_LARGE = 256 << 20  # bytes in memory of a process without which a ready server cannot work
_MAX_MESSAGE = 4096  # bytes of a message from the guard
_GUARD = Path(__file__).parent / "server_guard.py"


@dataclass
class _ServerProcess:
    pid: int
    fd: int  # a pidfd
    name: str
    resident: int  # bytes in memory at the last look
    was_large: bool = False  # at any time, because a process releases its memory before it exits
    stopped_at: float | None = None  # None: the process is not stopped

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
        max_bytes: float = math.inf,
        limited_by: str = "--server_memory_limit",
        outlives_s: float = 0.0,
        hidden_env: Mapping[str, str] = MappingProxyType({}),
        starts_on_other_nodes: bool = False,
    ) -> None:
        """Start the server. Raises OSError if the log cannot be written.

        Args:
            command: the server's command line.
            log: file to which the server's output is appended.
            wake: called once, as soon as `ended` returns a cause.
            grace_s: seconds that the server has to exit by itself if this process is killed.
            max_bytes: memory that the server's processes may use together. What they share counts once.
            limited_by: the option that sets `max_bytes`.
            outlives_s: seconds that the server may run after one of its processes was killed, because a
                server that ends may kill its own processes.
            hidden_env: environment variables that are not written to the log.
            starts_on_other_nodes: an mpirun of the server may start processes on all nodes of a batch job.
        """
        self.log = log
        self._begin = _size(log)  # end of the log when the server was started, later when it became ready
        self._wake = wake
        self._max_bytes, self._limited_by = max_bytes, limited_by
        self._measure_at = -math.inf  # when the memory may be measured again
        self._outlives_s = outlives_s
        self._lost: tuple[str, float] | None = None  # exit of a process, and the time of the exit
        self.code: int | None = None  # exit code of the server's first process
        self.cpu_s = 0.0  # CPU time of the server's running processes
        self._why = ""
        self._stopping = False
        self._needed: frozenset[int] = frozenset()  # the server's processes when it became ready
        self._first: int | None = None  # id of the server's first process
        self._processes: dict[int, _ServerProcess] = {}
        self._first_exit: tuple[float, str] = 0.0, ""  # of its other processes, within `_CAUSE_WINDOW_S`
        self._shared: set[str] = set()  # files in /dev/shm that the server has created
        self._connection, guard_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = clean_environment if starts_on_other_nodes else environment_of_this_node
        with guard_end, log.open("ab") as output:
            output.write(f"$ {command}\n".encode())
            output.flush()
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_GUARD), str(grace_s), *command.argv],
                env={**environment(os.environ), **command.env, **hidden_env},
                stdin=guard_end.fileno(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a launcher that ends this process's group does not end the guard
            )
        self._descendants = Descendants(self._guard.pid)
        self._unwatched: list[int] = []  # new processes
        self._guard_state = _ServerProcess(self._guard.pid, -1, "its guard", 0)
        self._watcher = threading.Thread(target=self._watch, name=f"watch {log.stem}", daemon=True)
        self._watcher.start()

    @property
    def pids(self) -> list[int]:
        """Ids of the server's processes at the last look."""
        return list(self._processes)

    def ready(self) -> None:
        """Record that the server is ready: from now on, the exit of a large process is a failure.

        Processes that the server starts later, such as compilers, may exit.
        """
        self._needed = frozenset(self._processes)
        self._begin = _size(self.log)

    def ended(self) -> str:
        """Return why the server has ended: which process has exited, and how; "" while the server runs."""
        return self._why

    def tail(self, lines: int = 15) -> str:
        """Return the last lines of the server's log, indented."""
        return tail(self.log, lines)

    def silent_s(self) -> float:
        """Return the seconds since the server's last output; 0 without a log."""
        try:
            return max(0.0, time.time() - self.log.stat().st_mtime)
        except OSError:
            return 0.0

    def cause(self, server: str, event: str, explain: Callable[[str], str]) -> str:
        """Return the cause of a failure: the event, a known explanation, and the end of the log.

        `explain` returns the explanation of a known failure in a log, or "".
        """
        known, end = explain(self.tail(SEARCHED)), self.tail()
        failures = [f"  | {line}" for line in failing_lines(self.log, self._begin) if line not in end]
        lines = [f"{server}: {event}", *([known] if known else [])]
        lines += [f"failures in {self.log}, the first ones:", *failures] if failures else []
        return "\n".join([*lines, f"the end of {self.log}:", end])

    def stop(self, grace_s: float) -> None:
        """End the server and its descendants by SIGTERM, after `grace_s` by SIGKILL; wait for their end."""
        if self._stopping:
            return
        self._stopping = True
        with contextlib.suppress(OSError):  # the guard has exited
            self._guard.send_signal(signal.SIGCONT)
            self._connection.sendall(f"{grace_s:g}\n".encode())
        self._watcher.join(_KILL_S)
        self._connection.close()
        try:
            self._guard.wait(grace_s + _KILL_S)
        except subprocess.TimeoutExpired:  # a process hangs in the kernel
            self._guard.kill()
        self._kill_left()
        run_folders.sweep()
        with contextlib.suppress(OSError):  # such as a full disk
            _mask_log(self.log)
        if self._guard.poll() != 0:  # the guard was killed, and has not cleaned up
            for name in self._shared:
                with contextlib.suppress(OSError):
                    (SHM / name).unlink()

    # --- the watcher's thread, until `stop` ---

    def _watch(self) -> None:
        while not self._stopping and not self._why:
            try:
                why = self._look()
            except OSError:  # such as too many open files; the guard still reports exits
                why = ""
                time.sleep(_LOOK_S)
            if why and not self._stopping:
                self._why = why
                self._wake()

    def _look(self) -> str:
        """Wait a moment for an exit; return why the server has ended, or which process is stopped."""
        self._watch_new()
        by_fd = {process.fd: process for process in self._processes.values()}
        line = self._connection.fileno()
        ready = readable([line, *by_fd], _LOOK_S)
        # If processes exit simultaneously, descendants come first.
        ended = [self._remove(by_fd[fd]) for fd in reversed(ready) if fd in by_fd]
        others = [text for process, text, _ in ended if process.pid != self._first]
        now = time.monotonic()
        if others and now - self._first_exit[0] > _CAUSE_WINDOW_S:
            self._first_exit = now, others[0]
        if line in ready and (why := self._read_message()):
            # The first exit is more informative than the server's own exit code.
            killed = next((text for process, text, bad in ended if bad and process.pid != self._first), "")
            if self.code == 0 and self._outlives_s:
                return why
            return killed or self._lost_text() or self._after(why)
        for process, text, bad in ended:
            is_needed = process.pid in self._needed and process.was_large
            if process.pid != self._first and (bad or is_needed):
                # A small process that exited before this one may be the cause.
                text = text if bad or self._first_exit[1] == text else f"{self._first_exit[1]}, then {text}"
                if not self._outlives_s:
                    return text
                self._lost = self._lost or (text, time.monotonic())
        late = self._lost is not None and time.monotonic() - self._lost[1] > self._outlives_s
        return (self._lost_text() if late else "") or self._stopped() or self._too_large()

    def _after(self, why: str) -> str:
        """Return how the server ended, with the exit of another process shortly before.

        That process may be small, and its exit code unknown because its parent has read the code. But after a
        fatal signal, the server may itself start a process, for example to write a stack trace.
        """
        at, text = self._first_exit
        if self.code is None or not text or time.monotonic() - at > _CAUSE_WINDOW_S:
            return why
        return f"{why}; shortly before, {text}" if -self.code in _FATAL else f"{text}, then the server {why}"

    def _lost_text(self) -> str:
        return self._lost[0] if self._lost else ""

    def _read_message(self) -> str:
        """Read a message of the guard; return how the server ended, or "" if it has not ended."""
        parts = self._connection.recv(_MAX_MESSAGE).split(maxsplit=1)
        if not parts:
            self._kill_left()
            return f"its guard (pid {self._guard.pid}) has ended"
        kind, value = parts
        if kind == b"shared":
            self._shared.add(os.fsdecode(value))
        elif kind == b"started":
            self._first = int(value)
        if kind != b"ended":
            return ""
        self.code = code = int(value)
        return how_ended(code)

    def _watch_new(self) -> None:
        """Watch processes that have started since the last look."""
        self._unwatched += self._descendants.new()
        while self._unwatched:
            pid = self._unwatched[0]
            with contextlib.suppress(ProcessLookupError):
                self._processes[pid] = _ServerProcess(pid, os.pidfd_open(pid), _name(pid) or "starting", 0)
            del self._unwatched[0]  # after an error, such as too many open files, it is tried again

    def _remove(self, process: _ServerProcess) -> tuple[_ServerProcess, str, bool]:
        """Remove an exited process; return it, how it exited, and whether by a signal in `_FATAL`."""
        status = _exit_status(process.pid)
        del self._processes[process.pid]
        os.close(process.fd)
        number = os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else 0
        how = how_ended(-number) if number else "has ended"
        return process, f"{process} {how}", number in _FATAL

    def _stopped(self) -> str:
        now, ticks = time.monotonic(), 0
        for process in (self._guard_state, *self._processes.values()):
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = _stat(process.pid)
                process.resident = int(fields[21]) * _PAGE
                process.was_large |= process.resident >= _LARGE
                if process is not self._guard_state:
                    ticks += int(fields[11]) + int(fields[12])
                    process.name = _name(process.pid) or process.name  # a process may change its name
                if fields[0] not in ("T", "t"):
                    process.stopped_at = None
                elif process.stopped_at is None:
                    process.stopped_at = now
                elif now - process.stopped_at >= _STOPPED_S:
                    return f"{process} is stopped: kill -CONT {process.pid}"
        self.cpu_s = ticks / _TICKS_PER_S
        return ""

    def _too_large(self) -> str:
        now, processes = time.monotonic(), self._processes.values()
        # This sum may count shared pages several times, but each look has it anyway.
        if sum(process.resident for process in processes) <= self._max_bytes or now < self._measure_at:
            return ""
        sizes = [_proportional_size(process) for process in processes]
        self._measure_at = now + (time.monotonic() - now) / _MEASURING_SHARE
        if (used := sum(sizes)) <= self._max_bytes:
            return ""
        _, largest = max(zip(sizes, processes, strict=True), key=lambda each: each[0])
        return f"holds {used / _GIB:.3g} GiB of memory, more than {self._limited_by}; most of it {largest}"

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
    """Return the fields of /proc/PID/stat from the third on, which is the state."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def _exit_status(pid: int) -> int | None:
    """Return the wait status of an exited process; None if its parent has already read it."""
    try:
        fields = _stat(pid)
        return int(fields[49]) if fields[0] in ("Z", "X") else None
    except (OSError, ValueError, IndexError):
        return None


def _proportional_size(process: _ServerProcess) -> int:
    """Return a process's bytes in memory: of pages that n processes share, the nth part."""
    try:
        with Path(f"/proc/{process.pid}/smaps_rollup").open(errors="replace") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
    except (OSError, StopIteration):  # it has exited, or belongs to another user
        return process.resident


def _name(pid: int) -> str:
    """Return a process's shortened command line; "" before exec, and after its exit."""
    try:
        args = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return " ".join(filter(None, [Path(args[0]).name, *args[1:3]]))[:40]
    except OSError:
        return ""


def _mask_log(log: Path) -> None:
    """Overwrite the secrets in a log, because vLLM, for example, prints its options. Raises OSError."""
    with log.open("r+b") as file:
        while data := file.read(_PIECE):
            data += file.readline(_PIECE)
            if (masked := without_known_bytes(data)) != data:
                file.seek(-len(data), os.SEEK_CUR)
                file.write(masked)
