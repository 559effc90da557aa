"""The ranks of this job on this host, as the system reports them, including ranks that do not respond."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from launch.environment import EXIT_FILE
from launch.exits import Exits, RankExit, sentence
from launch.launcher import find_launcher
from launch.outside import whole_number
from launch.prctl import KEEPER

# Hydra's ranks have none of the first three. Without `mpillm mpirun` they have one parent.
_JOBS = ("PMIX_NAMESPACE", "PMI_JOBID", "SLURM_STEP_ID", EXIT_FILE)
_STATES = {
    "T": "is stopped: kill -CONT {}",
    "t": "is held by a debugger",
    "D": "waits for a disk",
    "Z": "has ended",
}


_STOPPED = "Tt"
_STOPPED_S = 0.6
_GONE = "ZX"

_STARTED_S = 10.0
"""By then a launcher has started all ranks of a host, of which it has started one."""


class Sibling(NamedTuple):
    """A rank's process."""

    pid: int
    state: str  # its letter in /proc
    place: int | None = None  # among those of this host, from 0; None: the launcher does not tell


def visible_pids() -> str:
    """Return what names the processes that this one can see: its host's, or its container's; "" if
    unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def start_ticks(pid: int) -> str:
    """Return when a process started, in the kernel's ticks; "" if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]


def ranks_here() -> int | None:
    """Return how many ranks of this job are on this host; None if the launcher does not tell.

    Unlike `siblings` it counts those that have not started yet.
    """
    return _first_number(os.environ, "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def _place(env: Mapping[str, str]) -> int | None:
    """Return which of its host's ranks a process is."""
    return _first_number(env, "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


def _first_number(env: Mapping[str, str], *names: str) -> int | None:
    """Return the number of the first variable that has one."""
    numbers = (whole_number(env.get(name, "")) for name in names)
    return next((number for number in numbers if number is not None), None)


def siblings() -> dict[int, Sibling]:
    """Return the processes on this host that the same launcher started, by rank."""
    own = find_launcher()
    if own is None:
        return {}
    found: dict[int, list[Sibling]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError, ValueError):
                env = _environment(folder)
                other = find_launcher(env)
                if (
                    other is None
                    or other.rank is None
                    or other.name != own.name
                    or _job(env) != _job(os.environ)
                ):
                    continue
                name, _, stat = (folder / "stat").read_text().rpartition(")")
                state, parent = stat.split()[:2]
                if name.endswith(f"({KEEPER}"):
                    continue
                if any(name in env for name in _JOBS) or int(parent) == os.getppid():
                    # of a rank and the processes that it started, the eldest
                    found.setdefault(other.rank, []).append(Sibling(int(folder.name), state, _place(env)))
    return {rank: min(processes) for rank, processes in found.items()}


def describe_rank(rank: int) -> str:
    """Return what the system says of a rank that does not answer: `` (pid 12 is stopped: …)``, or ""."""
    sibling = siblings().get(rank)
    return "" if sibling is None else _told(sibling)


def stopped_ranks() -> str:
    """Name the ranks of this host that somebody has stopped; "" if none is."""
    found = {rank: sibling for rank, sibling in sorted(siblings().items()) if sibling.state in _STOPPED}
    return ", ".join(f"rank {rank}{_told(sibling)}" for rank, sibling in found.items())


def ended_here() -> list[int]:
    """Return the ranks of this host that are not there (any more), where all ranks are on this host."""
    own = find_launcher()
    if own is None or own.size is None or own.size != ranks_here():
        return []
    there = siblings().keys()
    return [rank for rank in range(own.size) if rank not in there] if len(there) > 1 else []


class EndedRanks:
    """Finds the ranks of this host that have exited unexpectedly."""

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}
        self._places: dict[int, int | None] = {}
        self.exits = Exits[int]()  # once it is readable, call `look` immediately
        self._watched: set[int] = set()
        self._since = time.monotonic()

    def look(self) -> str:
        """Name the ranks that were there at an earlier look and have ended; "" if none has.

        After a while also those that were never seen, where `ranks_here` knows how many there should be.
        """
        # First: Open MPI soon ends others because of it.
        first = {*self.exits.look()}
        self._watched -= first  # one may have been a short-lived child of its rank
        there = siblings()
        now = {rank: sibling.pid for rank, sibling in there.items()}
        self._places |= {rank: sibling.place for rank, sibling in there.items()}
        if ended := {rank for rank, pid in self._pids.items() if rank not in now and not runs(pid)}:
            host = socket.gethostname()
            return sentence(RankExit(rank, host, self._pids[rank]) for rank in ended & first or ended)
        self._watched |= {
            rank for rank, pid in now.items() if rank not in self._watched and self.exits.watch(rank, pid)
        }
        self._pids |= now
        here, own = ranks_here(), find_launcher()
        if here is None or len(self._pids) >= here or time.monotonic() < self._since + _STARTED_S:
            return ""
        if len(self._pids) < 2:
            return ""  # each in a container of its own, perhaps: then none sees the others
        missing = _missing(here, own is not None and own.size == here, self._places)
        if missing is None:
            return (
                f"{here - len(self._pids)} of the {here} ranks on {socket.gethostname()} have ended, or were"
                " not started"
            )
        return sentence(RankExit(rank, how="has ended, or was not started") for rank in missing)


def _missing(n: int, alone: bool, places: Mapping[int, int | None]) -> list[int] | None:
    """Return the ranks of this host, `n` of them, that are not among `places` (by rank).

    None if that is not known: where ranks are on other hosts, too (not `alone`), these must be in a row.
    """
    if alone:
        return sorted(set(range(n)) - places.keys())
    firsts = {None if place is None else rank - place for rank, place in places.items()}
    first = firsts.pop() if len(firsts) == 1 else None
    return None if first is None else sorted(set(range(first, first + n)) - places.keys())


def runs(pid: int) -> bool:
    """Return whether the process exists and is more than a zombie.

    Only the system's word that there is none means that it has ended: with no file descriptor left, say, this
    process can't look.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return process_state(pid) not in _GONE
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True


def process_state(pid: int) -> str:
    """Return the letter of a process's state. Raises OSError if there is no such process."""
    with open(f"/proc/{pid}/stat", errors="replace") as file:  # noqa: PTH123 - ten times faster than Path
        return file.read().rpartition(")")[2].split()[0]


def how_it_is_stopped(pid: int) -> str:
    """Return the words for a process that somebody has stopped; "" if none has."""
    try:
        state = process_state(pid)
    except OSError:
        return ""
    return _STATES[state].format(pid) if state in _STOPPED else ""


class StoppedProcesses:
    """Finds processes that have been stopped for longer than a snapshot tool stops them."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._reported: set[int] = set()

    def look(self, pids: Iterable[int]) -> list[tuple[int, str]]:
        """Return the stopped processes that no earlier look has returned, with the words for each.

        Call it often, with all processes. One that goes on and is stopped again is returned again.
        """
        now = time.monotonic()
        states = {}
        for pid in pids:
            with contextlib.suppress(OSError):
                states[pid] = process_state(pid)
        stopped = [pid for pid, state in states.items() if state in _STOPPED]
        self._since = {pid: self._since.get(pid, now) for pid in stopped}
        self._reported &= {*stopped}
        late = [pid for pid in stopped if self._since[pid] <= now - _STOPPED_S and pid not in self._reported]
        self._reported |= {*late}
        return [(pid, _STATES[states[pid]].format(pid)) for pid in late]


def _told(sibling: Sibling) -> str:
    return f" (pid {sibling.pid} {_STATES.get(sibling.state, 'runs').format(sibling.pid)})"


def _environment(folder: Path) -> dict[str, str]:
    pairs = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


def _job(env: Mapping[str, str]) -> tuple[str | None, ...]:
    return tuple(env.get(name) for name in _JOBS)
