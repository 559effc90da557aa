"""Role of a rank that runs a load client in place of LoadGen: start it, watch it, and read its report."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from disagg.errors import ConfigError
from launch.command import Command
from launch.owned_server import OwnedServer
from mpillm.errors import ExitCode, Failure, RunError
from mpillm.phases import Phase
from mpillm.programs.load_clients.kind import LoadClientKind, LoadReport, LoadSpec
from mpillm.roles.role import Role

_log = logging.getLogger(__name__)
_LOOK_S = 0.5
_GRACE_S = 2.0  # for the client to exit after SIGTERM, if the run ends before the client
_OUTLIVES_S = 10.0  # after one of its processes is killed, the client has this time to exit by itself
_MAX_CHARACTERS = 100  # displayed characters of the client's last line
_IDLE = 0.003  # share of a CPU core: a program that only waits uses less


def command_of(kind: LoadClientKind, load: LoadSpec) -> Command:
    """Return the client's command line. Raises ConfigError if the client cannot run or make this load."""
    try:
        command = kind.command(load)
    except ValueError as error:
        raise ConfigError(f"--harness: {kind.title} {error}", about=["harness"]) from None
    command = kind.located(command)
    return replace(command, env={**command.env, **_past_proxies(load.urls)})


def _past_proxies(urls: Iterable[str]) -> dict[str, str]:
    """Return environment variables that exclude these servers from the environment's proxies."""
    proxies = getproxies()
    if not proxies:
        return {}
    hosts = (urlsplit(url).hostname for url in urls)
    direct = ",".join(filter(None, (proxies.get("no"), *hosts)))
    return {"no_proxy": direct, "NO_PROXY": direct}


@dataclass(frozen=True)
class ClientLimits:
    """Limits of a load client."""

    stall_s: float  # maximum time without output and without CPU use
    max_bytes: float  # host memory of all the client's processes


class ClientProgram(Role):
    """Role that owns the load client. The run's own endpoint is another role of the same rank."""

    owns_processes = True

    def __init__(
        self,
        kind: LoadClientKind,
        prepare: Callable[[Mapping[int, str]], LoadSpec],
        end: Callable[[], object],
        log: Path,
        limits: ClientLimits,
        wake: Callable[[], None],
    ) -> None:
        """`prepare`: function that returns the load. It receives the URLs of the run's servers, by index.

        `end`: function that starts to drain the run's endpoint.
        """
        self._kind = kind
        self._prepare = prepare
        self._end = end
        self._path = log
        self._limits = limits
        self._wake = wake
        self._urls: Mapping[int, str] = {}
        self._load: LoadSpec | None = None
        self._command: Command | None = None
        self._program: OwnedServer | None = None
        self._progress = (0, 0.0, 0.0)  # log bytes, CPU seconds, time of their last change
        self._looked_at = 0.0
        self.report_of_client: LoadReport | None = None  # None until the client has exited successfully
        self.max_server_tokens: float | None = None  # see `LoadClientKind.max_server_tokens`
        self.started = (0.0, 0.0)  # the client's start: time.monotonic(), time.time()

    # --- phases ---

    def find_servers(self, urls: Mapping[int, str]) -> None:
        self._urls = urls

    def warmup(self) -> None:
        """Write the client's files."""
        self._load = self._prepare(self._urls)
        if self._load.folder.exists():  # with reports of an earlier run
            shutil.rmtree(self._load.folder)
        self._load.folder.mkdir(parents=True)
        self._command = command_of(self._kind, self._load)
        self._kind.write(self._load)

    def test(self) -> None:
        assert self._command is not None
        _log.info("%s: %s", self._kind.title, self._command)
        self.started = time.monotonic(), time.time()
        self._program = OwnedServer(
            self._command,
            self._path,
            self._wake,
            _GRACE_S,
            self._limits.max_bytes,
            limited_by="--harness_memory_limit",
            outlives_s=_OUTLIVES_S,
        )
        self._progress = (0, 0.0, self.started[0])

    def done(self, phase: Phase) -> bool:
        return phase != "test" or self.report_of_client is not None

    def stop(self) -> None:
        if self._program is not None:
            self._program.stop(_GRACE_S)

    # --- the client ---

    def poll(self) -> bool:
        if self._program is None or self.report_of_client is not None:
            return False
        if why := self._program.ended():
            self._on_end(why)
            return True
        if (now := time.monotonic()) - self._looked_at > _LOOK_S:
            self._looked_at = now
            self._check_progress(now)
        return False

    def quiet_s(self) -> float:
        waits = self._program is not None and self.report_of_client is None
        return _LOOK_S if waits else super().quiet_s()

    def last_line(self) -> str:
        """Return the client's last printed line, shortened, or the last state of its progress bar."""
        if self._program is None:
            return ""
        last = self._program.tail(1).rpartition("\r")[2].strip().removeprefix("|").strip()
        return "starts" if last.startswith("$ ") else last[:_MAX_CHARACTERS]

    def _check_progress(self, now: float) -> None:
        assert self._program is not None
        size, cpu_s, at = self._progress
        stall_s = self._limits.stall_s
        grown, used_s = self._path.stat().st_size, self._program.cpu_s
        if grown != size or abs(used_s - cpu_s) > _IDLE * stall_s:
            self._progress = (grown, used_s, now)
        elif now - at > stall_s:
            raise self._failure(f"has printed and computed nothing for {stall_s:g} s (--stall_timeout)")

    def _on_end(self, why: str) -> None:
        assert self._program is not None and self._load is not None
        if self._program.code != 0:
            raise self._failure(why)
        try:
            report = self._kind.report(self._load)
        except ConfigError as error:
            raise self._failure(f"{why}, but {error}") from error
        if not report.completed:
            raise self._failure(f"{why}, and reports no request that was answered ({report.failed} failed)")
        self.max_server_tokens = self._kind.max_server_tokens(self._load, report)
        self.report_of_client = report
        self._end()

    def _failure(self, event: str) -> RunError:
        assert self._program is not None
        cause = self._program.cause(self._kind.title, event, self._kind.explain)
        return RunError(Failure(cause, 0, code=ExitCode.TEST_FAILED))
