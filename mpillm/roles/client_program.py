"""The role of a rank that starts another client in LoadGen's place, watches it, and reads its report."""

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
_GRACE_S = 2.0  # to end by itself, if the run ends before it
_OUTLIVES_S = 10.0  # a process of its own that was killed: then it ends, or never will
_SHOWN = 100  # characters of its last line
_IDLE = 0.003  # of a core: less than that is what a program uses that only waits


def command_of(kind: LoadClientKind, load: LoadSpec) -> Command:
    """Return the client's command line. Raises ConfigError if it is missing or cannot make this load."""
    try:
        command = kind.command(load)
    except ValueError as error:
        raise ConfigError(f"--harness: {kind.title} {error}", about=["harness"]) from None
    command = kind.located(command)
    return replace(command, env={**command.env, **_past_proxies(load.urls)})


def _past_proxies(urls: Iterable[str]) -> dict[str, str]:
    """Return what keeps a client from asking the environment's proxies for servers of the run."""
    proxies = getproxies()
    if not proxies:
        return {}
    hosts = (urlsplit(url).hostname for url in urls)
    direct = ",".join(filter(None, (proxies.get("no"), *hosts)))
    return {"no_proxy": direct, "NO_PROXY": direct}


@dataclass(frozen=True)
class Bounds:
    """What the client may take."""

    stall_s: float  # of doing nothing
    max_bytes: float  # of memory


class ClientProgram(Role):
    """Owns the client, beside the role of the run's own endpoint."""

    owns = True

    def __init__(
        self,
        kind: LoadClientKind,
        prepare: Callable[[Mapping[int, str]], LoadSpec],
        end: Callable[[], object],
        log: Path,
        bounds: Bounds,
        wake: Callable[[], None],
    ) -> None:
        """`prepare`: what it is to do, from the URLs of the run's servers.

        `end`: begins to drain the endpoint.
        """
        self._kind = kind
        self._prepare = prepare
        self._end = end
        self._path = log
        self._bounds = bounds
        self._wake = wake
        self._urls: Mapping[int, str] = {}
        self._load: LoadSpec | None = None
        self._command: Command | None = None
        self._program: OwnedServer | None = None
        self._did = (0, 0.0, 0.0)  # bytes of its log, seconds of CPU, and when that was noted
        self._looked_at = 0.0
        self.report_of_client: LoadReport | None = None  # once it has ended well
        self.started = (0.0, 0.0)  # time.monotonic(), time.time()

    # --- phases ---

    def find_servers(self, urls: Mapping[int, str]) -> None:
        self._urls = urls

    def warmup(self) -> None:
        """Write what the client reads."""
        self._load = self._prepare(self._urls)
        if self._load.folder.exists():  # with reports of an earlier run
            shutil.rmtree(self._load.folder)
        self._load.folder.mkdir(parents=True)
        self._command = command_of(self._kind, self._load)
        self._kind.write(self._load)

    def test(self) -> None:
        assert self._command is not None
        _log.info("%s: %s", self._kind.title, self._command)
        self.started, most = (time.monotonic(), time.time()), self._bounds.max_bytes
        self._program = OwnedServer(
            self._command,
            self._path,
            self._wake,
            _GRACE_S,
            most,
            limited_by="--harness_memory_limit",
            outlives_s=_OUTLIVES_S,
        )
        self._did = (0, 0.0, self.started[0])

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
            self._must_do_something(now)
        return False

    def quiet_s(self) -> float:
        waits = self._program is not None and self.report_of_client is None
        return _LOOK_S if waits else super().quiet_s()

    def last_line(self) -> str:
        """Return the last line that it has printed, shortened; a progress bar as it was drawn last."""
        if self._program is None:
            return ""
        last = self._program.tail(1).rpartition("\r")[2].strip().removeprefix("|").strip()
        return "starts" if last.startswith("$ ") else last[:_SHOWN]

    def _must_do_something(self, now: float) -> None:
        assert self._program is not None
        size, cpu_s, at = self._did
        stall_s = self._bounds.stall_s
        grown, used_s = self._path.stat().st_size, self._program.cpu_s
        if grown != size or abs(used_s - cpu_s) > _IDLE * stall_s:
            self._did = (grown, used_s, now)
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
        self.report_of_client = report
        self._end()

    def _failure(self, what: str) -> RunError:
        assert self._program is not None
        cause = self._program.cause(self._kind.title, what, self._kind.explain)
        return RunError(Failure(cause, 0, code=ExitCode.TEST_FAILED))
