"""Launcher monitor: `mpillm mpirun` detects causes of a run's end that rank 0 cannot report.

These are the exit of rank 0 and of mpirun. An mpirun that loses a daemon, or is killed, ends all ranks. Open
MPI sends SIGTERM and drops later output of the ranks, so rank 0 cannot know the cause. MPICH leaves rank 0 no
time to report.
"""

from __future__ import annotations

import contextlib
import math
import re
import select
import time
from typing import NamedTuple

import psutil

from disagg import rank_list
from launch.exits import Exits, how_ended, sentence
from launch.own_messages import MESSAGE
from launch.roll_call import RollCall

_LOSES = re.compile(r"has lost communication with a remote daemon|A daemon failed to report back")
_WHERE = re.compile(r"Remote (?:daemon\s*:(?:(?!Remote ).)* on node|host:)\s+(\S+)")
_PROXY = re.compile(r"--proxy-id (\d+)")
_STATUS = re.compile(r"Daemon exit status:\s+([0-9]{1,9})")
_HYDRA_LOSES = "control_cb "  # in whose source a connection to a daemon may not end
_HYDRA_LOOKS_S = 0.5
_STILL_S = 1.0  # after rank 0 has told its exit code: its reason may be one that only the launcher knows


class Cause(NamedTuple):
    """Cause of a run's end, as far as this process knows it."""

    text: str
    rank: int | None = None  # whose log may say more


class Witness:
    """Watches mpirun's output and the registered ranks (`roll_call`)."""

    hydra_ends_s = 2.0  # after its own end, the ranks on all hosts
    goes_on_s = 2.0  # with a daemon less; when a run ends, all of them end sooner

    def __init__(self, roll_call: RollCall | None = None) -> None:
        """`roll_call`: None: all ranks are on this host."""
        self._roll_call = roll_call
        self._loses = False  # the next lines say which daemon
        self.host = ""  # of the daemon that Open MPI's mpirun has lost, or could not start
        self._heard_at = math.inf
        self._status = 0  # of the lost daemon, as a shell gives it
        self._proxy: int | None = None  # Hydra's lost daemon
        self._hydra_loses = False
        self._exits = Exits[int]()  # of the (remote) shells of Hydra's daemons, by its number of a daemon
        self._proxies: set[int] = set()  # that are or were watched
        self._gone: dict[int, float] = {}  # when a shell's end was seen; inf: it has been told
        self.told_person = False  # rank 0's message has come through

    def note_proxies(self, mpirun: int) -> None:
        """Note the processes through which Hydra's mpirun has started its daemons so far."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(mpirun).children():
                if match := _PROXY.search(" ".join(child.cmdline())):
                    self._note_proxy(int(match[1]), child.pid)

    def _note_proxy(self, number: int, pid: int) -> None:
        if number not in self._proxies and self._exits.watch(number, pid):
            self._proxies.add(number)

    def _look(self, wait_s: float = 0.0) -> None:
        """Note which of these processes have ended; wait for the first one."""
        if not self._gone:
            select.select([self._exits], [], [], wait_s)
        self._gone |= dict.fromkeys(self._exits.look(), time.monotonic())

    def goes_on_without(self) -> str:
        """Say that Hydra's mpirun has lost a daemon and goes on, once for each; "" if there is none to tell.

        Ranks hold the daemon's connection to mpirun, which so hears nothing of its end.
        """
        self._look()
        now, hosts = time.monotonic(), self.hosts()
        late = next((number for number, at in [*self._gone.items()] if now > at + self.goes_on_s), None)
        names = [*dict.fromkeys(hosts.values())]
        if late is None or late >= len(names):
            return ""
        self._gone[late] = math.inf
        host = names[late]
        who = rank_list([rank for rank, own in hosts.items() if own == host], hosts)
        return f"{who}: mpirun has lost its daemon on {host}; its ranks go on, but what they print is lost"

    def hear(self, line: str) -> bool:
        """Take a line that the ranks or mpirun have printed; any thread may call.

        Return whether it is for nobody else.
        """
        if self._roll_call is not None and self._roll_call.note_cut_off(line):
            return True
        if line.startswith(MESSAGE):
            self.told_person = True
        elif _HYDRA_LOSES in line and self._proxies:
            self._hydra_loses = True
            self._look(_HYDRA_LOOKS_S)
            self._proxy = next(iter(self._gone)) if len(self._gone) == 1 else None
        elif _LOSES.search(line):
            self._loses, self._heard_at = True, min(self._heard_at, time.monotonic())
        elif self._loses and not self.host and (match := _WHERE.search(line)):
            self.host = match[1]
        elif self._loses and (match := _STATUS.search(line)):
            self._status = int(match[1])
        return False

    def lost_by_open_mpi(self, told_at: float) -> str:
        """Say which daemon Open MPI's mpirun has lost; "" if none, or only after the run had ended
        (`told_at`)."""
        if not self.host or self._heard_at > told_at + _STILL_S:
            return ""
        how = f", which {how_ended(128 - self._status)}" if self._status > 128 else ""
        return self._lost(self.host, how)

    def hosts(self) -> dict[int, str]:
        """Return the hosts of ranks; of none if all are on this one."""
        return self._roll_call.hosts() if self._roll_call is not None else {}

    def before_rank_0(self, status: int) -> str:
        """Name who has ended before rank 0, which had no time to do so; "" if nobody is known to have.

        `status`: mpirun's.
        """
        if self._roll_call is None:
            return ""
        names = [*dict.fromkeys(self.hosts().values())]  # as mpirun numbers them
        if self._hydra_loses and (silent := self._only_silent_host()):
            return self._lost(silent, "")
        if self._proxy is not None and self._proxy < len(names):
            return self._lost(names[self._proxy], "")
        first = sentence(self._roll_call.before_rank_0())
        return f"{first}; then mpirun, with {status}, and all ranks" if first else ""

    def _only_silent_host(self) -> str:
        """Return the host of which nothing is heard though the ranks of all others have ended; "" if there is
        none: one that loses its power closes no connection.

        This counts more than which shell was seen to end: those of other hosts may, by mpirun's own end,
        before the lost one's.
        """
        assert self._roll_call is not None
        end = time.monotonic() + self.hydra_ends_s
        while (silent := self._roll_call.silent_hosts()) and time.monotonic() < end:
            time.sleep(0.05)
        return silent[0] if len(silent) == 1 else ""

    def _lost(self, host: str, how: str) -> str:
        hosts = self.hosts()
        there = [rank for rank, own in hosts.items() if own == host]
        who = f"{rank_list(there, hosts)}: " if there else ""
        return f"{who}mpirun has lost its daemon on {host}{how}, and ended all ranks"
