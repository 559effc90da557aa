"""Role of a rank that owns a server: start it, watch it, and end it with the run."""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError
from launch.command import Command
from launch.health_check import HealthCheck
from launch.interfaces import own_addresses
from launch.owned_server import SEARCHED, OwnedServer
from launch.reserved_port import ReservedPort
from launch.signals import stop_signals
from mpillm.cores.capabilities import OutlivesServer
from mpillm.errors import ExitCode, Failure, RunError
from mpillm.files import naming
from mpillm.phases import Phase
from mpillm.programs.servers.kind import PORT_IN_USE, NodesLauncher, ServerSpec
from mpillm.roles.role import Role

_log = logging.getLogger(__name__)
_CHECK_S = 0.2  # interval of health checks
_TRIES = 3  # maximum number of starts, if other processes take the server's ports
MAX_RESTARTS = 3
"""Maximum number of restarts of a server in a test, with --on_instance_loss restart."""
_GRACE_S = 10.0  # for the server to exit after SIGTERM, in a successful run
_SHORT_GRACE_S = 2.0  # in other cases: rank 0 waits for this rank only for --grace
_LOOPBACK = "127.0.0.1"
_LOG_LINES = 9  # lines read from the end of the server's log: the last ones may be a table's border
_MAX_CHARACTERS = 60  # maximum displayed characters of the server's last message
_SILENT_S = 5.0  # time without output after which the console displays the silence
# Prefix of a log message: process, level, time, file. Triton's logs have another order.
_PREFIX = re.compile(
    r"^(\([^)]* pid=\d+\) ?)?(\[[^\]]*\] ?)*((DEBUG|INFO|WARNING|ERROR):? +)?"
    r"(<std(out|err)>: ?)?([\d:,./ -]{5,} )?(\[[\w.]+:\d+\] ?)?"
    r"([IWEF]\d{4} [\d:.]+ +\d+ [\w.]+:\d+\] ?)?"
)


def last_message(log: str) -> str:
    """Return a server's last message, from the end of its log (see `OwnedServer.tail`); "" if none."""
    for line in reversed(log.splitlines()):
        if (line := line.strip().removeprefix("|").strip()).startswith("$ "):
            break  # the server's command line
        if any(map(str.isalpha, line := _PREFIX.sub("", line))):
            return line if len(line) <= _MAX_CHARACTERS else f"{line[: _MAX_CHARACTERS - 1]}…"
    return ""


def doing(name: str, message: str, server: OwnedServer) -> str:
    """Return the activity of a server that is not ready; `message`: its last message.

    A server may print nothing for its first minute, while it imports packages. Its CPU time shows progress.
    """
    if not message:
        return f"{name}: starts, {server.cpu_s:.0f} s of CPU so far"
    silent_s = server.silent_s()
    return f"{name}{f', silent {silent_s:.0f} s' if silent_s >= _SILENT_S else ''}: {message}"


class ServerRole(Role):
    """Role that owns a server, or this node's part of a server over several nodes."""

    owns_processes = True

    def __init__(
        self,
        spec: ServerSpec,
        folder: Path,
        deadline_s: float,
        wake: Callable[[], None],
        announce: Callable[[str, str], None],
        secret: str = "",
    ) -> None:
        """Prepare the start of the server.

        Args:
            spec: the server.
            folder: the run directory, for the server's log.
            deadline_s: maximum seconds until the server is ready.
            wake: wakes this rank's event loop.
            announce: see `RankControl.announce`.
            secret: value of the environment variable `ServerKind.secret`.
        """
        self._spec = spec
        self._folder = folder
        self._deadline_s = deadline_s
        self._wake = wake
        self._announce = announce
        secret_in = spec.kind.secret if spec.role else ""
        self._secret = {} if not secret_in or secret_in in os.environ else {secret_in: secret}
        self._server: OwnedServer | None = None
        self._ports: list[ReservedPort] = []  # HTTP port, then the ports of `more_ports`
        self._tries = 0
        self._started = 0.0
        self._check: HealthCheck | None = None
        self._is_ready = self._ends_well = False
        self._has_api = not spec.node.number  # the first node's part serves the API, once all parts are ready
        self._starts = self._has_api or spec.launcher is None
        self._startup_s = 0.0
        self.dependent: OutlivesServer | None = None  # this rank's client, if the server may be restarted
        self._test_started: float | None = None  # None: not in the test
        self._restarts: list[dict[str, Any]] = []

    # --- phases ---

    def load(self) -> None:
        self._started = time.monotonic()
        if self._starts:
            self._start()

    def done(self, phase: Phase) -> bool:
        return phase != "load" or self._is_ready or not self._has_api

    def health(self) -> None:
        # Phase load has ended, so the first node's part has found the server ready.
        if self._starts and not self._has_api:
            self._note_ready()

    def test(self) -> None:
        self._test_started = time.monotonic()

    def drain(self) -> None:
        self._ends_well = True
        self._test_started = None

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(_GRACE_S if self._ends_well else _SHORT_GRACE_S)
        for port in self._ports:
            port.release()

    def serves(self) -> dict[int, str]:
        return {self._spec.index: self._spec.url} if self._has_api else {}

    def doing(self) -> str:
        if self._server is None or self._is_ready:
            return ""
        return doing(self._spec.title, last_message(self._server.tail(_LOG_LINES)), self._server)

    def report(self) -> dict[str, Any]:
        if not self._has_api:
            return {}
        server = {"index": self._spec.index, "startup_s": round(self._startup_s, 3)}
        return {"server": {**server, **({"restarts": self._restarts} if self._restarts else {})}}

    # --- the server ---

    def _start(self) -> None:
        kind = self._spec.kind
        self._tries += 1
        self._ports = [ReservedPort(self._spec.host) for _ in range(1 + len(self._spec.more_ports))]
        self._spec = spec = self._resolved()
        try:
            command = spec.command()
        except ValueError as error:  # such as a missing model repository
            raise ConfigError(f"{spec.title}: {error}") from None
        if text := kind.file_text(spec):
            with naming(settings := spec.base.with_suffix(".yaml")):
                settings.write_text(text, encoding="utf-8")
        launcher = spec.launcher
        command = kind.located(command) if launcher is None else self._launched(launcher, command)
        if not kind.binds_reserved_port:
            for port in self._ports:
                port.release()
        _log.info("%s: %s", spec.title, command)
        log = spec.base.with_suffix(".log")
        self._server = OwnedServer(
            command,
            log,
            self._wake,
            _SHORT_GRACE_S,
            spec.max_bytes,
            hidden_env=self._secret,
            starts_on_other_nodes=spec.launcher is not None,
        )
        self._check = None

    def _launched(self, launcher: NodesLauncher, command: Command) -> Command:
        """Write the script of a server on several nodes, and return the line of its launcher."""
        script = self._spec.base.with_suffix(".sh")
        with naming(script):
            script.write_text(launcher.script(command), encoding="utf-8")
        try:
            return launcher.located(launcher.command(self._spec, command, ("sh", str(script))))
        except ValueError as error:
            raise ConfigError(f"{self._spec.title}: {error}") from None

    def _resolved(self) -> ServerSpec:
        """Return the server's specification with ports, address and folder. Raises ConfigError."""
        spec = self._spec
        try:
            address = socket.gethostbyname(spec.reached_at)  # some servers accept no host name
        except OSError as error:
            raise ConfigError(f"{spec.title}: {spec.reached_at} has no address: {error}") from None
        if spec.reached_at != _LOOPBACK and address.startswith("127."):  # as in Debian's /etc/hosts
            address = next(iter(own_addresses()), address)
        port, *others = (one.number for one in self._ports)
        more_ports = dict(zip(spec.more_ports, others, strict=True))
        return replace(spec, port=port, more_ports=more_ports, folder=self._folder, address=address)

    def poll(self) -> bool:
        if self._server is None:
            return False
        if why := self._server.ended():
            self._on_end(why)
        if self._is_ready or not self._has_api:
            return False
        if time.monotonic() - self._started > self._deadline_s:
            problem = f": {self._check.problem}" if self._check and self._check.problem else ""
            raise self._failure(f"was not ready within {self._deadline_s:g} s (--load_deadline){problem}")
        if self._check is None or (self._check.answered is False and self._check.is_old(_CHECK_S)):
            host = _LOOPBACK if self._spec.host == "0.0.0.0" else self._spec.host
            url = f"http://{host}:{self._ports[0].number}{self._spec.kind.health}"
            self._check = HealthCheck(url, self._check)
        elif self._check.answered:
            self._note_ready()
            if self._restarts and self.dependent is not None:
                self._restarts[-1]["back_after_s"] = round(self._startup_s, 3)
                back = f"ready after {self._startup_s:.1f} s; its open requests are sent again"
                self._announce("back", f"{self._spec.title}: {back}")
                self.dependent.server_back(self.serves()[self._spec.index])
        return False

    def _note_ready(self) -> None:
        assert self._server is not None
        self._is_ready = True
        self._startup_s = time.monotonic() - self._started  # since the latest start
        self._server.ready()
        _log.info("%s is ready after %.1f s", self._spec.title, self._startup_s)

    def quiet_s(self) -> float:
        return super().quiet_s() if self._is_ready or self._server is None else _CHECK_S / 4

    def _on_end(self, why: str) -> None:
        assert self._server is not None
        may = not self._is_ready and self._tries < _TRIES and self._spec.node.n == 1
        if may and PORT_IN_USE.is_in(self._server.tail(SEARCHED)):
            _log.warning("%s %s: another process took its port; it gets another one", self._spec.title, why)
            self._start_again()
            return
        may = self._test_started is not None and len(self._restarts) < self._spec.restarts
        if may and self.dependent is not None:
            assert self._test_started is not None
            cause = str(self._failure(why).failures[0].cause)
            _log.error("%s\nit is started again", cause)
            at = time.monotonic()
            self._announce("lost", f"{self._spec.title}: {why}; it is started again")
            self._restarts.append({"at_s": round(at - self._test_started, 3), "why": why})
            self.dependent.server_lost()
            self._is_ready, self._tries, self._started = False, 0, at
            self._start_again()
            return
        raise self._failure(why, self._is_cause())

    def _is_cause(self) -> bool:
        """Return whether the server's end is the cause of a failure, not a consequence.

        A server on one node with both phases depends on no other server. Its end is the cause, unless
        its first process exited by itself or by a stop signal.
        """
        assert self._server is not None
        spec, code = self._spec, self._server.code
        alone = spec.node.n == 1 and not spec.role
        return alone and (code is None or (code < 0 and -code not in stop_signals()))

    def _start_again(self) -> None:
        assert self._server is not None
        self._server.stop(_SHORT_GRACE_S)
        for port in self._ports:
            port.release()
        self._start()

    def _explain(self, log: str) -> str:
        launcher = self._spec.launcher
        where = launcher.explain(self._spec, log) if launcher else ""
        return ": ".join(filter(None, (where, self._spec.kind.explain(log))))

    def _failure(self, event: str, seen: bool = False) -> RunError:
        assert self._server is not None
        cause = self._server.cause(self._spec.title, event, self._explain)
        was_ready = self._is_ready or bool(self._restarts)
        code = ExitCode.INSTANCE_LOST if was_ready else ExitCode.NOT_READY
        # A part of a server usually exits because another part has exited.
        has_parts = self._spec.node.n > 1 and self._spec.launcher is None
        may_follow = has_parts and event == f"ended with exit code {self._server.code}"
        return RunError(Failure(cause, self._spec.rank, code=code, may_follow=may_follow, seen=seen))
