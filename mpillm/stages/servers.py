"""Start servers, wait until they are ready, watch them, stop them.

    check_ports(servers)
    with Servers(folder) as running:
        for server in servers:
            running.start_server(server)
        running.wait_ready(deadline_s)
        running.watch(stall_s)

`ServerFailed` contains the server's name and the end of its log. Leaving the context stops every server, also
after an error.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from disagg.errors import ConfigError
from launch.children import Child, Children
from launch.command import Command
from launch.exits import how_ended
from launch.health_check import HealthCheck

_ORPHAN_S = 2.0  # time for a process to notice that its parent has ended


@dataclass(frozen=True)
class Server:
    """A server to start."""

    name: str
    command: Command
    ports: Mapping[str, int]  # ports that it opens, by purpose
    health: tuple[str, ...]  # URLs that answer 200 when it is ready; empty: no check
    urls: tuple[str, ...] = ()  # addresses for clients
    files: Mapping[Path, str] = field(default_factory=dict)  # files that it reads, written before its start
    keeps_job: bool = False  # the server is a rank of an mpirun and needs its variables
    log: str = ""  # the log's file name; empty: from the name
    table: Callable[[], Sequence[str]] | None = None  # returns lines about its models, after it is ready
    reason: str = ""  # pattern of log lines with the cause of its end
    # Beginning of the names of descendants without which it cannot answer; "": none. tritonserver (2.51)
    # stays ready after the end of a Python model's process, and never answers the open requests.
    needs: str = ""
    # Kill processes that outlive their parent. A killed tritonserver can leave the process of a Python model,
    # which waits for the server forever (2.51 and the source of 2.73: `SendIsCancelled`). mpirun waits for
    # that process because it has the rank's output open.
    ends_orphans: bool = False


class ServerFailed(Exception):
    """A server ended, was not ready in time, or does not answer. `was_ready`: all were ready before."""

    def __init__(self, message: str, was_ready: bool) -> None:
        super().__init__(message)
        self.was_ready = was_ready


@dataclass
class _NeededProcess:
    """A process without which a server cannot answer."""

    child: Child
    process: psutil.Process
    text: str  # its id and its name
    missing_since: float | None = None

    def missing_s(self, now: float) -> float:
        """Return for how long it has not run; 0: it runs."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if self.process.is_running() and self.process.status() != psutil.STATUS_ZOMBIE:
                return 0.0
        self.missing_since = self.missing_since or now
        return now - self.missing_since


class Servers(Children):
    """Context that starts servers and stops them at its end."""

    def __init__(
        self, folder: Path, poll_s: float = 0.5, check_interval_s: float = 10.0, end_s: float = 10.0
    ) -> None:
        """
        Args:
            folder: For logs; it must exist.
            check_interval_s: Time between health checks of ready servers.
            end_s: Time for a server to end by itself after a process that it needs. Its exit is more
                informative.
        """
        super().__init__()
        self._end_s = end_s
        self._folder = folder
        self._poll_s, self._check_interval_s = poll_s, check_interval_s
        self._servers: dict[str, Server] = {}  # by name
        self._names: dict[str, str] = {}  # server by health URL
        self._checks: dict[str, HealthCheck] = {}  # last check by health URL
        self._answered_at: dict[str, float] = {}  # time of the last answer by health URL
        self._needed: list[_NeededProcess] = []  # of ready servers
        self._next_check = 0.0
        self._ready = False

    def start_server(self, server: Server) -> Path:
        """Start a server and return its log. Raises ConfigError if its program cannot be started."""
        log = self._folder / (server.log or f"{server.name.replace(' ', '_')}.log")
        log.write_text(f"$ {server.command}\n", encoding="utf-8")
        self.start(server.name, server.command.argv, server.command.environment(server.keeps_job), log)
        self._names |= dict.fromkeys(server.health, server.name)
        self._servers[server.name] = server
        return log

    def wait_ready(self, deadline_s: float) -> float:
        """Wait until every health URL answers, and return the seconds of the wait.

        Raises ServerFailed after `deadline_s`, or when a server ends.
        """
        began = time.monotonic()
        deadline = began + deadline_s
        waiting = list(self._names)
        while waiting:
            self._end_orphans()
            if child := self.ended():
                raise ServerFailed(self._how_ended(child, "before it was ready"), False)
            for url in waiting:
                if url not in self._checks or self._checks[url].answered is False:
                    self._checks[url] = HealthCheck(url, self._checks.get(url))
            again = min(time.monotonic() + self._poll_s, deadline)
            for url in waiting:
                self._checks[url].wait(again)
            waiting = [url for url in waiting if not self._checks[url].answered]
            if waiting and time.monotonic() >= deadline:
                raise self._silent(waiting, f"not ready within {deadline_s:g} s (--load_deadline)")
            time.sleep(max(0.0, again - time.monotonic()) if waiting else 0)
        self._ready = True
        self._needed = [one for child in self.running() for one in self._needed_by(child)]
        now = time.monotonic()
        self._answered_at, self._next_check = dict.fromkeys(self._names, now), now + self._check_interval_s
        return now - began

    def watch(self, stall_s: float) -> str:
        """Wait until a server ends with exit code 0, and return its name.

        Raises ServerFailed if one fails or does not answer.
        """
        while (ended := self.poll(stall_s)) is None:
            time.sleep(self._poll_s)
        return ended

    def poll(self, stall_s: float) -> str | None:
        """Do one step of `watch`; return None while all servers run.

        It starts health checks when they are due. A later call reads their results.
        """
        self._end_orphans()
        if child := self.ended():
            if child.process.returncode == 0:
                return child.name
            raise ServerFailed(self._how_ended(child, "after it was ready" if self._names else ""), True)
        now = time.monotonic()
        if lost := next((one for one in self._needed if one.missing_s(now) > self._end_s), None):
            raise ServerFailed(
                f"{lost.child.name}: its process {lost.text} has ended; the end of {lost.child.log}:\n"
                f"{lost.child.tail()}",
                True,
            )
        is_due, silent = now >= self._next_check, []
        self._next_check = now + self._check_interval_s if is_due else self._next_check
        for url, check in self._checks.items():
            answered = check.answered  # read once, because another thread sets it
            if answered:
                self._answered_at[url] = check.ended
            elif check.is_late(now) and now - self._answered_at[url] > stall_s:
                silent.append(url)
            if is_due and answered is not None:
                self._checks[url] = HealthCheck(url, check)
        if silent:
            raise self._silent(silent, f"no answer to a health check for {stall_s:g} s (--stall_timeout)")
        return None

    def _needed_by(self, child: Child) -> Iterator[_NeededProcess]:
        if name := self._servers[child.name].needs:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in psutil.Process(child.process.pid).children(recursive=True):
                    if (known := process.name()).startswith(name):
                        yield _NeededProcess(child, process, f"{process.pid} ({known})")

    def _end_orphans(self) -> None:
        if any(server.ends_orphans for server in self._servers.values()):
            self.end_orphans(_ORPHAN_S)

    def _how_ended(self, child: Child, when: str) -> str:
        why = "".join(f"  | {line}\n" for line in child.lines(self._servers[child.name].reason))
        log = f"; from {child.log}:\n{why}  | …\n" if why else f"; the end of {child.log}:\n"
        return f"{child.name} {how_ended(child.process.returncode)} {when}".rstrip() + log + child.tail()

    def _silent(self, urls: Sequence[str], problem: str) -> ServerFailed:
        names = {self._names[url] for url in urls}
        tails = "\n".join(child.tail() for child in self.running() if child.name in names)
        causes = "".join(f"; {url}: {self._checks[url].problem}" for url in urls if self._checks[url].problem)
        return ServerFailed(
            f"{problem}: {', '.join(sorted(names))}{causes}; the end of the log:\n{tails}", self._ready
        )


def write_files(folder: Path, servers: Collection[Server]) -> None:
    """Create the folder for the logs, and write the files that servers read. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in files_of(servers).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def files_of(servers: Iterable[Server]) -> dict[Path, str]:
    """Return the files that servers read, without repetitions."""
    return {path: text for server in servers for path, text in server.files.items()}


def check_ports(servers: Iterable[Server]) -> None:
    """Raise ConfigError, with the users, if two servers have the same port, or a port is in use."""
    users: dict[int, str] = {}
    for server in servers:
        for purpose, port in server.ports.items():
            user = f"{purpose} of {server.name}"
            if port in users:
                raise ConfigError(f"port {port} is given to both {user} and {users[port]}")
            users[port] = user
            if problem := _bind_problem(port):
                raise ConfigError(f"can't listen on port {port} for {user}: {problem}")


def _bind_problem(port: int) -> str:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return _holder(port) or str(error.strerror)
    return ""


def _holder(port: int) -> str:
    try:
        listening = [
            c
            for c in psutil.net_connections("tcp")
            if c.laddr and c.laddr.port == port and c.status == psutil.CONN_LISTEN
        ]
        process = next(psutil.Process(c.pid) for c in listening if c.pid)
        return f"process {process.pid} ({process.name()}) uses it"
    except (StopIteration, psutil.Error):
        return ""


def ports_here(urls: Iterable[str]) -> dict[str, int]:
    """Return the ports of the addresses ``host:port`` on this host."""
    names = {"localhost", "127.0.0.1", "0.0.0.0", os.environ.get("HOSTNAME")}
    names |= {socket.gethostname(), socket.getfqdn()}
    return {url: int(url.rpartition(":")[2]) for url in urls if url.rpartition(":")[0] in names}
