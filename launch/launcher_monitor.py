"""Launcher monitor: `mpillm mpirun` detects causes of a run's end that rank 0 cannot report.

These causes are the exits of rank 0, of mpirun, and of mpirun's daemons. An mpirun that loses a daemon, or is
killed, ends all ranks. Open MPI's mpirun sends SIGTERM and drops later output of the ranks, so rank 0 cannot
report the cause. MPICH's mpirun leaves rank 0 no time to report.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from typing import NamedTuple

import psutil

from disagg import rank_list
from launch.exits import Exits, how_ended, sentence
from launch.own_messages import MESSAGE
from launch.rank_registry import RankRegistry
from launch.readable import readable

_LOST_DAEMON = re.compile(r"has lost communication with a remote daemon|A daemon failed to report back")
_DAEMON_HOST = re.compile(r"Remote (?:daemon\s*:(?:(?!Remote ).)* on node|host:)\s+(\S+)")
_PROXY = re.compile(r"--proxy-id (\d+)")
_STATUS = re.compile(r"Daemon exit status:\s+([0-9]{1,9})")
_HYDRA_LOST_DAEMON = "control_cb "  # Hydra prints this function's name if a daemon's connection ends
_HYDRA_LOOK_S = 0.5
_AFTER_EXIT_CODE_S = 1.0  # an exit code that rank 0 wrote this shortly before may follow from a lost daemon


class Cause(NamedTuple):
    """Cause of a run's end, as far as this process can determine it."""

    text: str
    rank: int | None = None  # a rank whose log may have details


class LauncherMonitor:
    """Watches mpirun's output and the registered ranks."""

    hydra_ends_s = 2.0  # time for the ranks on all hosts to exit after Hydra's mpirun
    goes_on_s = 2.0  # a run that goes on so long after a daemon's exit has lost the daemon

    def __init__(self, registry: RankRegistry | None = None) -> None:
        """`registry`: None if all ranks are on this host."""
        self._registry = registry
        self._describes_loss = False  # the next lines describe the lost daemon
        self.host = ""  # host of the daemon that Open MPI's mpirun has lost, or could not start
        self._lost_at = math.inf  # time of Open MPI's message
        self._status = 0  # exit status of the lost daemon, as a shell reports it
        self._proxy: int | None = None  # number of Hydra's lost daemon
        self._hydra_lost_daemon = False
        self._exits = Exits[int]()  # of the (remote) shells of Hydra's daemons, by the daemon's number
        self._proxies: set[int] = set()  # daemons whose shells are or were watched
        self._exited_at: dict[int, float] = {}  # when a shell's exit was noticed; inf: already reported
        self.failure_is_printed = False  # rank 0's message has arrived

    def note_proxies(self, mpirun: int) -> None:
        """Watch the processes through which Hydra's mpirun has started its daemons so far."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(mpirun).children():
                if match := _PROXY.search(" ".join(child.cmdline())):
                    self._note_proxy(int(match[1]), child.pid)

    def _note_proxy(self, number: int, pid: int) -> None:
        if number not in self._proxies and self._exits.watch(number, pid):
            self._proxies.add(number)

    def _look(self, wait_s: float = 0.0) -> None:
        """Record which watched processes have exited; wait up to `wait_s` for the first exit."""
        if not self._exited_at:
            readable([self._exits], wait_s)
        self._exited_at |= dict.fromkeys(self._exits.look(), time.monotonic())

    def lost_hydra_daemon(self) -> str:
        """Describe a lost daemon that Hydra's mpirun has not noticed, once for each daemon; "" if none.

        Ranks hold the daemon's connection to mpirun, so mpirun does not detect the daemon's exit.
        """
        self._look()
        now, hosts = time.monotonic(), self.hosts()
        late = next((number for number, at in [*self._exited_at.items()] if now > at + self.goes_on_s), None)
        names = [*dict.fromkeys(hosts.values())]
        if late is None or late >= len(names):
            return ""
        self._exited_at[late] = math.inf
        host = names[late]
        ranks = rank_list([rank for rank, own in hosts.items() if own == host], hosts)
        return f"{ranks}: mpirun has lost its daemon on {host}; its ranks go on, but their output is lost"

    def read_line(self, line: str) -> bool:
        """Read a line that the ranks or mpirun have printed. Any thread may call this.

        Returns whether the line is only for the launcher.
        """
        if self._registry is not None and self._registry.note_cut_off(line):
            return True
        if line.startswith(MESSAGE):
            self.failure_is_printed = True
        elif _HYDRA_LOST_DAEMON in line and self._proxies:
            self._hydra_lost_daemon = True
            self._look(_HYDRA_LOOK_S)
            self._proxy = next(iter(self._exited_at)) if len(self._exited_at) == 1 else None
        elif _LOST_DAEMON.search(line):
            self._describes_loss, self._lost_at = True, min(self._lost_at, time.monotonic())
        elif self._describes_loss and not self.host and (match := _DAEMON_HOST.search(line)):
            self.host = match[1]
        elif self._describes_loss and (match := _STATUS.search(line)):
            self._status = int(match[1])
        return False

    def lost_openmpi_daemon(self, finished_at: float) -> str:
        """Describe the daemon that Open MPI's mpirun has lost.

        "" if no daemon was lost, or if it was lost after the run had finished (`finished_at`).
        """
        if not self.host or self._lost_at > finished_at + _AFTER_EXIT_CODE_S:
            return ""
        how = f", which {how_ended(128 - self._status)}" if self._status > 128 else ""
        return self._describe(self.host, how)

    def hosts(self) -> dict[int, str]:
        """Return the hosts of the ranks; empty if all ranks are on this host."""
        return self._registry.hosts() if self._registry is not None else {}

    def exits_before_rank_0(self, status: int) -> str:
        """Name the ranks that exited before rank 0, which had no time to name them; "" if none is known.

        `status`: mpirun's exit status.
        """
        if self._registry is None:
            return ""
        names = [*dict.fromkeys(self.hosts().values())]  # hosts, in the order of mpirun's daemons
        if self._hydra_lost_daemon and (silent := self._only_silent_host()):
            return self._describe(silent, "")
        if self._proxy is not None and self._proxy < len(names):
            return self._describe(names[self._proxy], "")
        first = sentence(self._registry.exits_before_rank_0())
        return f"{first}; then mpirun, with {status}, and all ranks" if first else ""

    def _only_silent_host(self) -> str:
        """Return the only host without a reported exit, if the ranks of all other hosts have exited; else "".

        A host without power closes no connection. This outweighs the exits of shells, because mpirun's own
        end may end shells of other hosts before the shell of the lost host.
        """
        assert self._registry is not None
        end = time.monotonic() + self.hydra_ends_s
        while (silent := self._registry.silent_hosts()) and time.monotonic() < end:
            time.sleep(0.05)
        return silent[0] if len(silent) == 1 else ""

    def _describe(self, host: str, how: str) -> str:
        hosts = self.hosts()
        on_host = [rank for rank, own in hosts.items() if own == host]
        ranks = f"{rank_list(on_host, hosts)}: " if on_host else ""
        return f"{ranks}mpirun has lost its daemon on {host}{how}, and ended all ranks"
