"""The role of a rank that owns a server: it starts it, sees how it does, and ends it with the run."""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError
from launch.command import Command, find_program
from launch.health_check import HealthCheck
from launch.held_port import HeldPort
from launch.interfaces import own_addresses
from launch.owned_server import SEARCHED, OwnedServer
from launch.signals import stop_signals
from mpillm.cores.capabilities import OutlivesServer
from mpillm.devices import as_visible
from mpillm.errors import ExitCode, Failure, RunError
from mpillm.files import naming
from mpillm.phases import Phase
from mpillm.programs.servers.kind import PORT_TAKEN, Part, ServerKind, Wanted, base_name
from mpillm.roles.role import Role

_log = logging.getLogger(__name__)
_CHECK_S = 0.2  # between health checks
_TRIES = 3  # of ports that others take first
MOST_RESTARTS = 3
"""How often a server is started again in a test, with --on_instance_loss restart."""
_GRACE_S = 10.0  # to end by itself, after a run that ended well
_SHORT_GRACE_S = 2.0  # and after another: rank 0 waits for the ranks no longer
_LOOPBACK = "127.0.0.1"
_LOOKED_AT = 9  # lines of its log: the last may be a table's edge
_SHOWN = 60  # characters of its last line
_SILENT_S = 5.0  # without a line: said
# What loggers put before a message: a process, a level, a time, a file; Triton's in another order.
_PREFIX = re.compile(
    r"^(\([^)]* pid=\d+\) ?)?(\[[^\]]*\] ?)*((DEBUG|INFO|WARNING|ERROR):? +)?"
    r"([\d:,./ -]{5,} )?(\[[\w.]+:\d+\] ?)?"
    r"([IWEF]\d{4} [\d:.]+ +\d+ [\w.]+:\d+\] ?)?"
)


@dataclass(frozen=True)
class ServerPlan:
    """What this rank's server, or part of one, is to be."""

    index: int
    rank: int  # that owns it
    kind: ServerKind
    model: str  # a folder, or what the server calls a model; "" if it needs none
    values: Mapping[str, Any]  # see `Wanted`
    args: tuple[str, ...]
    devices: tuple[int, ...] | None  # GPUs, as the rank counts them; None: there are none
    place: int  # among the servers of its node
    program: str | None  # where the user says that it is
    most_bytes: float  # of memory
    host: str  # where it listens
    reached_at: str  # the host's name for its clients
    restarts: int = 0  # how often it may be started again in the test
    role: str = ""  # see `Wanted`, here and below
    llm_args: Mapping[str, Any] = field(default_factory=dict)
    part: Part = field(default_factory=Part)

    @property
    def name(self) -> str:
        """How messages call it."""
        half = f", {self.role}" if self.role else ""
        return f"server {self.index} ({self.kind.name.rstrip(':')}{half}{self.of_parts})"

    @property
    def of_parts(self) -> str:
        """Which part of a server over several nodes it is, for messages."""
        return f", part {self.part.node + 1} of {self.part.n}" if self.part.n > 1 else ""

    @property
    def base(self) -> str:
        """What its files' names begin with."""
        return base_name(self.index, self.part.node)

    @property
    def ports(self) -> tuple[str, ...]:
        """The names of its ports besides that of HTTP."""
        return self.kind.ports(self.role)

    def wanted(self, ports: Sequence[int | str], base: Path | str, address: str = "") -> Wanted:
        """Return what the kind makes a command line of; `base`, `address`: see there."""
        port, *others = ports
        devices = None if self.devices is None or not self.kind.takes_gpus else as_visible(self.devices)
        return Wanted(
            self.model,
            Path(self.model).name,
            self.host,
            port,
            self.values,
            self.args,
            devices,
            str(base),
            self.place,
            dict(zip(self.ports, others, strict=True)),
            self.program,
            self.role,
            address or self.reached_at,
            self.llm_args,
            self.part,
        )

    def shown(self) -> Command:
        """Return its command line with names in place of what is chosen when it starts.

        Raises ValueError for values that the kind can't take.
        """
        ports = ["PORT", *(f"{name.upper()}_PORT" for name in self.ports)]
        return self.kind.command(self.wanted(ports, self.base))


def last_said(log: str) -> str:
    """Return what a server has said last, from the end of its log (see `OwnedServer.tail`); "": nothing."""
    for line in reversed(log.splitlines()):
        if (line := line.strip().removeprefix("|").strip()).startswith("$ "):
            break  # its command
        if any(map(str.isalpha, line := _PREFIX.sub("", line))):
            return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 1]}…"
    return ""


def doing(name: str, said: str, server: OwnedServer) -> str:
    """Return what a server that is not ready does; `said`: its last line.

    That of one which imports says nothing for a minute: its CPU time shows that it lives.
    """
    if not said:
        return f"{name}: starts, {server.cpu_s:.0f} s of CPU so far"
    silent_s = server.silent_s()
    return f"{name}{f', silent {silent_s:.0f} s' if silent_s >= _SILENT_S else ''}: {said}"


class ServerRole(Role):
    """Owns a server."""

    owns = True

    def __init__(
        self,
        plan: ServerPlan,
        folder: Path,
        deadline_s: float,
        wake: Callable[[], None],
        announce: Callable[[str, str], None],
        secret: str = "",
    ) -> None:
        """`folder`: of the run, for its log; `deadline_s`: for it to become ready; `wake`: this rank;
        `announce`: see `RankControl`; `secret`: see `ServerKind.secret`."""
        self._plan = plan
        self._folder = folder
        self._deadline_s = deadline_s
        self._wake = wake
        self._announce = announce
        secret_in = plan.kind.secret if plan.role else ""
        self._secret = {} if not secret_in or secret_in in os.environ else {secret_in: secret}
        self._server: OwnedServer | None = None
        self._ports: list[HeldPort] = []  # that of HTTP, and the kind's others
        self._wanted: Wanted | None = None
        self._tries = 0
        self._started = 0.0
        self._check: HealthCheck | None = None
        self._is_ready = self._ends_well = False
        self._answers = not plan.part.node  # the first part, once all are there; nobody asks another
        self._startup_s = 0.0
        self.dependent: OutlivesServer | None = None  # of one that may be started again
        self._test_started: float | None = None  # in the test
        self._restarts: list[dict[str, Any]] = []

    # --- phases ---

    def load(self) -> None:
        self._started = time.monotonic()
        self._start()

    def done(self, phase: Phase) -> bool:
        return phase != "load" or self._is_ready or not self._answers

    def health(self) -> None:
        if not self._answers:  # the first part does
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
            port.let_go()

    def serves(self) -> dict[int, str]:
        assert self._wanted is not None
        if not self._answers:
            return {}
        return {self._plan.index: self._plan.kind.url(self._plan.reached_at, self._wanted)}

    def doing(self) -> str:
        if self._server is None or self._is_ready:
            return ""
        return doing(self._plan.name, last_said(self._server.tail(_LOOKED_AT)), self._server)

    def report(self) -> dict[str, Any]:
        if not self._answers:
            return {}
        server = {"index": self._plan.index, "startup_s": round(self._startup_s, 3)}
        return {"server": {**server, **({"restarts": self._restarts} if self._restarts else {})}}

    # --- the server ---

    def _start(self) -> None:
        plan = self._plan
        self._tries += 1
        self._ports = [HeldPort(plan.host) for _ in range(1 + len(plan.ports))]
        base = self._folder / plan.base
        try:
            address = socket.gethostbyname(plan.reached_at)  # not everything listens at a name
        except OSError as error:
            raise ConfigError(f"{plan.name}: {plan.reached_at} has no address: {error}") from None
        if plan.reached_at != _LOOPBACK and address.startswith("127."):  # as Debian names a host to itself
            address = next(iter(own_addresses()), address)
        self._wanted = plan.wanted([port.number for port in self._ports], base, address)
        try:
            command = plan.kind.command(self._wanted)
        except ValueError as error:  # a model repository that this node lacks, say
            raise ConfigError(f"{plan.name}: {error}") from None
        if text := plan.kind.file_text(self._wanted):
            with naming(settings := base.with_suffix(".yaml")):
                settings.write_text(text, encoding="utf-8")
        program = find_program(command.argv[0], plan.kind.install or "name it by its path", typed=True)
        if not plan.kind.binds_held_port:
            for port in self._ports:
                port.let_go()
        command = Command((program, *command.argv[1:]), command.env)
        _log.info("%s: %s", plan.name, command)
        log = base.with_suffix(".log")
        self._server = OwnedServer(
            command, log, self._wake, _SHORT_GRACE_S, plan.most_bytes, unshown=self._secret
        )
        self._check = None

    def poll(self) -> bool:
        if self._server is None:
            return False
        if why := self._server.ended():
            self._on_end(why)
        if self._is_ready or not self._answers:
            return False
        if time.monotonic() - self._started > self._deadline_s:
            problem = f": {self._check.problem}" if self._check and self._check.problem else ""
            raise self._failure(f"was not ready within {self._deadline_s:g} s (--load_deadline){problem}")
        if self._check is None or (self._check.answered is False and self._check.is_old(_CHECK_S)):
            host = _LOOPBACK if self._plan.host == "0.0.0.0" else self._plan.host
            url = f"http://{host}:{self._ports[0].number}{self._plan.kind.health}"
            self._check = HealthCheck(url, self._check)
        elif self._check.answered:
            self._note_ready()
            if self._restarts and self.dependent is not None:
                self._restarts[-1]["back_after_s"] = round(self._startup_s, 3)
                back = f"ready after {self._startup_s:.1f} s; its open requests are sent again"
                self._announce("back", f"{self._plan.name}: {back}")
                self.dependent.server_back(self.serves()[self._plan.index])
        return False

    def _note_ready(self) -> None:
        assert self._server is not None
        self._is_ready = True
        self._startup_s = time.monotonic() - self._started  # the latest
        self._server.ready()
        _log.info("%s is ready after %.1f s", self._plan.name, self._startup_s)

    def quiet_s(self) -> float:
        return super().quiet_s() if self._is_ready or self._server is None else _CHECK_S / 4

    def _on_end(self, why: str) -> None:
        assert self._server is not None
        may = not self._is_ready and self._tries < _TRIES and self._plan.part.n == 1
        if may and PORT_TAKEN.is_in(self._server.tail(SEARCHED)):
            _log.warning("%s %s: another process took its port; it gets another one", self._plan.name, why)
            self._start_again()
            return
        may = self._test_started is not None and len(self._restarts) < self._plan.restarts
        if may and self.dependent is not None:
            assert self._test_started is not None
            said = str(self._failure(why).failures[0].cause)
            _log.error("%s\nit is started again", said)
            at = time.monotonic()
            self._announce("lost", f"{self._plan.name}: {why}; it is started again")
            self._restarts.append({"at_s": round(at - self._test_started, 3), "why": why})
            self.dependent.server_lost()
            self._is_ready, self._tries, self._started = False, 0, at
            self._start_again()
            return
        raise self._failure(why, self._is_cause())

    def _is_cause(self) -> bool:
        """Return whether nothing else explains the server's end.

        It is no part or half, which may end because another has, and nobody has asked it to end.
        """
        assert self._server is not None
        plan, code = self._plan, self._server.code
        alone = plan.part.n == 1 and not plan.role
        return alone and (code is None or (code < 0 and -code not in stop_signals()))

    def _start_again(self) -> None:
        assert self._server is not None
        self._server.stop(_SHORT_GRACE_S)
        for port in self._ports:
            port.let_go()
        self._start()

    def _failure(self, what: str, seen: bool = False) -> RunError:
        assert self._server is not None
        cause = self._server.cause(self._plan.name, what, self._plan.kind.explain)
        was_ready = self._is_ready or bool(self._restarts)
        code = ExitCode.INSTANCE_LOST if was_ready else ExitCode.NOT_READY
        # A part usually ends by itself because another part has ended.
        may_follow = self._plan.part.n > 1 and what == f"ended with exit code {self._server.code}"
        return RunError(Failure(cause, self._plan.rank, code=code, may_follow=may_follow, seen=seen))
