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
from launch.prctl import KEEPER
from launch.safe_text import whole_number

# Variables that are equal on all ranks of a job. Hydra's ranks have only the last one, from `mpillm mpirun`.
# Without it, they have a common parent.
_JOBS = ("PMIX_NAMESPACE", "PMI_JOBID", "SLURM_STEP_ID", EXIT_FILE)
_STATES = {
    "T": "is stopped: kill -CONT {}",
    "t": "is held by a debugger",
    "D": "waits for a disk",
    "Z": "has ended",
}

_STOPPED = "Tt"
_EXITED = "ZX"


class RankProcess(NamedTuple):
    """A rank's process."""

    pid: int
    state: str  # the state's letter in /proc
    place: int | None = None  # number among the ranks of this host, from 0; None: unknown


def visible_pids() -> str:
    """Return a name of this process's host or container, whose processes it can see; "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def start_ticks(pid: int) -> str:
    """Return when a process started, in the kernel's ticks; "" if it does not run."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]


def ranks_here() -> int | None:
    """Return the number of this job's ranks on this host; None if unknown.

    Unlike `siblings`, this also counts ranks that have not started yet.
    """
    return _first_number(os.environ, "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def _place(env: Mapping[str, str]) -> int | None:
    """Return the number of a rank among the ranks of its host, from 0."""
    return _first_number(env, "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


def _first_number(env: Mapping[str, str], *names: str) -> int | None:
    """Return the number in the first of the variables that contains a number."""
    numbers = (whole_number(env.get(name, "")) for name in names)
    return next((number for number in numbers if number is not None), None)


def siblings() -> dict[int, RankProcess]:
    """Return the processes on this host that the same launcher started, by rank."""
    own = find_launcher()
    if own is None:
        return {}
    by_rank: dict[int, list[RankProcess]] = {}
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
                    # The oldest process is the rank. The others are its children.
                    by_rank.setdefault(other.rank, []).append(
                        RankProcess(int(folder.name), state, _place(env))
                    )
    return {rank: min(processes) for rank, processes in by_rank.items()}


def describe_rank(rank: int) -> str:
    """Return the system's state of a silent rank: `` (pid 12 is stopped: …)``, or ""."""
    sibling = siblings().get(rank)
    return "" if sibling is None else _state_text(sibling)


def stopped_ranks() -> str:
    """Name the ranks of this host whose processes are stopped (SIGSTOP); "" if none is."""
    stopped = {rank: sibling for rank, sibling in sorted(siblings().items()) if sibling.state in _STOPPED}
    return ", ".join(f"rank {rank}{_state_text(sibling)}" for rank, sibling in stopped.items())


def ended_here() -> list[int]:
    """Return the ranks that do not run, if all ranks are on this host; otherwise an empty list."""
    own = find_launcher()
    if own is None or own.size is None or own.size != ranks_here():
        return []
    running = siblings().keys()
    return [rank for rank in range(own.size) if rank not in running] if len(running) > 1 else []


class EndedRanks:
    """Finds the ranks of this host that have exited unexpectedly."""

    def __init__(self, all_started_s: float = 10.0) -> None:
        """`all_started_s`: time from now within which all ranks of this host start."""
        self._pids: dict[int, int] = {}
        self._places: dict[int, int | None] = {}
        self.exits = Exits[int]()  # when this is readable, call `look` immediately
        self._watched: set[int] = set()
        self._all_started_at = time.monotonic() + all_started_s

    def look(self) -> str:
        """Name the ranks that ran at an earlier look and have exited; "" if none has exited.

        After some seconds, also name ranks that have not started, if `ranks_here` returns their number.
        """
        # Read the exits first: Open MPI soon ends other ranks because of the first exit.
        first = {*self.exits.look()}
        self._watched -= first  # the exited process may have been a short-lived child of its rank
        running = siblings()
        now = {rank: sibling.pid for rank, sibling in running.items()}
        self._places |= {rank: sibling.place for rank, sibling in running.items()}
        if ended := {rank for rank, pid in self._pids.items() if rank not in now and not runs(pid)}:
            host = socket.gethostname()
            return sentence(RankExit(rank, host, self._pids[rank]) for rank in ended & first or ended)
        self._watched |= {
            rank for rank, pid in now.items() if rank not in self._watched and self.exits.watch(rank, pid)
        }
        self._pids |= now
        here, own = ranks_here(), find_launcher()
        if here is None or len(self._pids) >= here or time.monotonic() < self._all_started_at:
            return ""
        if len(self._pids) < 2:
            return ""  # each rank may be in its own container, and unable to see the others
        missing = _missing(here, own is not None and own.size == here, self._places)
        if missing is None:
            return (
                f"{here - len(self._pids)} of the {here} ranks on {socket.gethostname()} have ended, or were"
                " not started"
            )
        return sentence(RankExit(rank, how="has ended, or was not started") for rank in missing)


def _missing(n: int, alone: bool, places: Mapping[int, int | None]) -> list[int] | None:
    """Return those of this host's `n` ranks that are not in `places` (a rank's number on this host, by rank).

    If other hosts also have ranks (not `alone`), the ranks of this host must be consecutive. Otherwise, the
    missing ranks are unknown: None.
    """
    if alone:
        return sorted(set(range(n)) - places.keys())
    firsts = {None if place is None else rank - place for rank, place in places.items()}
    first = firsts.pop() if len(firsts) == 1 else None
    return None if first is None else sorted(set(range(first, first + n)) - places.keys())


def runs(pid: int) -> bool:
    """Return whether the process exists and is more than a zombie.

    Other errors, such as too many open files, do not mean that the process has exited.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return process_state(pid) not in _EXITED
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True


def process_state(pid: int) -> str:
    """Return the letter of a process's state. Raises OSError if there is no such process."""
    with open(f"/proc/{pid}/stat", errors="replace") as file:  # noqa: PTH123 - ten times faster than Path
        return file.read().rpartition(")")[2].split()[0]


def how_it_is_stopped(pid: int) -> str:
    """Return the description of a stopped process; "" if it is not stopped."""
    try:
        state = process_state(pid)
    except OSError:
        return ""
    return _STATES[state].format(pid) if state in _STOPPED else ""


class StoppedProcesses:
    """Finds processes that are stopped for longer than a snapshot tool would stop them (`min_stop_s`)."""

    def __init__(self, min_stop_s: float = 0.6) -> None:
        self._min_stop_s = min_stop_s
        self._since: dict[int, float] = {}
        self._reported: set[int] = set()

    def look(self, pids: Iterable[int]) -> list[tuple[int, str]]:
        """Return the stopped processes that no earlier call has returned, with a description.

        Call this often, with all processes. A process that is stopped again is returned again.
        """
        now = time.monotonic()
        states = {}
        for pid in pids:
            with contextlib.suppress(OSError):
                states[pid] = process_state(pid)
        stopped = [pid for pid, state in states.items() if state in _STOPPED]
        self._since = {pid: self._since.get(pid, now) for pid in stopped}
        self._reported &= {*stopped}
        early = now - self._min_stop_s
        late = [pid for pid in stopped if self._since[pid] <= early and pid not in self._reported]
        self._reported |= {*late}
        return [(pid, _STATES[states[pid]].format(pid)) for pid in late]


def _state_text(sibling: RankProcess) -> str:
    return f" (pid {sibling.pid} {_STATES.get(sibling.state, 'runs').format(sibling.pid)})"


def _environment(folder: Path) -> dict[str, str]:
    pairs = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


def _job(env: Mapping[str, str]) -> tuple[str | None, ...]:
    return tuple(env.get(name) for name in _JOBS)
