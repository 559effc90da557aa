"""Rank 0's part of phases, failures and the end of a run: see `control`."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpi4py import MPI

from disagg import WorldPlan
from launch.environment import told_lost
from launch.roll_call import ROLL_CALL
from launch.siblings import StoppedProcesses, ended_here, how_it_is_stopped, runs
from mpillm.comms.control import CHECK_INTERVAL_S, RankControl, Stopped
from mpillm.comms.expendable import Expendable
from mpillm.comms.kept_connections import ends_with_a_rank
from mpillm.comms.lifeline import Lifelines
from mpillm.comms.messages import (
    ARRIVED,
    BEAT,
    BYE,
    EVENT,
    FAILED,
    LOST,
    RELEASE,
    STOP,
    WAITING,
    Arrived,
    Beat,
    DrainReport,
    Event,
    Release,
    Stop,
)
from mpillm.comms.own_network import own_network_lost
from mpillm.comms.watch import beat_interval_s
from mpillm.errors import ExitCode, Failure, Interrupted, RunError
from mpillm.phases import PHASES, Phase

_QUIET_BEATS, _QUIET_S = 3, 3.0  # without so many beats, and for so long, a rank seems stopped
_LAUNCHER_LOOKS_S = 1.0  # four times as often
_SETTLE_S = 0.5  # after the first failure: time for others with the same cause to arrive
_LOOK_S = 0.5  # between looks at the processes of this host: each one reads a file per rank


@dataclass
class RankState:
    """What rank 0 knows about a rank."""

    label: str  # "rank 3"; once there is a plan, "rank 3 (gen, instance 1)"
    instance: int | None = None
    host: str = ""
    pid: int = 0
    pids: str = ""  # see `siblings.visible_pids`
    heard: float = field(default_factory=time.monotonic)
    seen: str = ""  # the phase of its last message
    beat: Beat | None = None
    measured: Any = None  # from its latest beat (see `Role.measured`)
    doing: str = "not here yet"  # likewise (see `Role.doing`)

    def describe(self) -> str:
        """Return label, host and pid."""
        return f"{self.label}, {self.host}, pid {self.pid}" if self.pid else self.label

    def does(self) -> str:
        """Return what it said last that it does, in a line; "" if nothing."""
        return self.doing.partition("\n")[0] if self.beat else ""

    def last_seen(self) -> str:
        """Return the phase of its last message and, if its main thread was stuck there, the stack."""
        stack = (
            f", stuck for {self.beat.away_s:.1f} s in:\n{self.beat.stack.rstrip()}"
            if self.beat and self.beat.stack
            else ""
        )
        return f"last seen in phase '{self.seen}'{stack}" if self.seen else "it has not joined"


class Rank0Control:
    """Rank 0's additional part: counts arrivals, releases phases, checks deadlines, ends the run."""

    def __init__(
        self,
        control: RankControl,
        size: int,
        started: float,
        on_complete: Callable[[Phase, float, dict[int, Any]], Any],
        on_event: Callable[[int, Event], None] = lambda rank, event: None,
    ) -> None:
        """`started`: when the first phase started (time.monotonic).

        `on_complete(phase, seconds, reports by rank)` is called when all ranks have arrived; its value is
        released to all. `on_event(rank, event)` is called for each event of a rank.
        """
        self._control = control
        self._transport = control.transport
        self._limits = control.limits
        self._on_complete = on_complete
        self.ranks = [RankState(f"rank {rank}") for rank in range(size)]
        self.phase = PHASES[0]
        self.phase_started = started
        self._arrived: dict[Phase, dict[int, Any]] = {}
        self._failures: dict[int, Failure] = {}
        self.last_reports: dict[int, DrainReport] = {}  # of a test that a signal ends
        self.last_read: Callable[[int], str] = lambda rank: ""
        """Returns which file a rank read last, for the cause of a failure; "" if unknown."""
        self._told_of: set[int] = set()  # ranks whose failures another rank has told
        self._settled_at = 0.0
        self._ends = False  # whether the run does, with a failure
        self._checked = time.monotonic()
        self._check_at = self._checked + CHECK_INTERVAL_S
        self._byes: set[int] = {0}
        self._by_pids: dict[str, list[int]] = {}  # ranks that have joined, by `RankState.pids`
        self._nobody_silent_until = 0.0
        self.expendable: Expendable | None = None  # None: the run does not outlive a rank
        self._lost: dict[
            int, float
        ] = {}  # ranks of lost instances, and when (time.monotonic) they are killed
        self._seen_cut = 0
        self._lost_elsewhere: frozenset[int] = frozenset()  # as MPI and launcher know, asked in the end only
        self.lifelines: Lifelines | None = None  # of ranks whose processes rank 0 can't see
        self._stopped_processes = StoppedProcesses()
        self._next_look = 0.0  # at them
        ARRIVED.handle(self._transport, self._on_arrived)
        BEAT.handle(self._transport, self._on_beat)
        FAILED.handle(self._transport, self._on_failed)
        EVENT.handle(self._transport, on_event)
        self._on_event = on_event
        BYE.handle(self._transport, lambda source, _: self._byes.add(source))

    def poll(self) -> bool:
        """Check deadlines and heartbeats. Raises RunError if the run can't go on."""
        if self._control.outcome is not None:
            return False
        now = time.monotonic()
        if now < self._check_at and len(self.cut()) == self._seen_cut:
            return False
        self._check_at = now + CHECK_INTERVAL_S
        self._seen_cut = len(self.cut())
        away, self._checked = now - self._checked, now
        if away > 1:
            # Beats that came while rank 0 itself was busy may be still unread: that time does not count.
            for state in self.ranks:
                state.heard = min(now, state.heard + away)
        self.heard_now(0)
        self._report_stopped()
        if gone := self.losses(self.gone()):
            self._go_on_without(gone)
        if self._failures and now > self._settled_at:
            failures = tuple(self._failures.values())
            self._failures.clear()
            if failures := self._without_who_waits(failures):
                self._go_on_without(failures)
        self.kill_lost(now)
        deadline = self._limits.phases[self.phase]
        if now - self.phase_started > deadline and not self._failures:
            raise RunError(*self._late(deadline))
        return False

    def watched_pids(self) -> list[int] | None:
        """Return the processes that `poll` looks after; None if one is neither seen from here nor on a
        lifeline."""
        seen = [state.pid for state in self.ranks[1:] if self._sees(state)]
        return seen if self.lifelines is not None or len(seen) == len(self.ranks) - 1 else None

    def check_soon(self) -> None:
        """Look after them at the next `poll`: one has ended."""
        self._check_at = 0.0

    def awaited(self) -> dict[str, list[int]]:
        """Return the ranks that have not arrived at the end of the phase, by what they say they do.

        Any thread may ask.
        """
        found: dict[str, list[int]] = {}
        there = {*self._arrived.get(self.phase, ()), *self._lost}
        for rank, state in enumerate(self.ranks):
            if rank not in there:
                found.setdefault(state.doing, []).append(rank)
        return found

    def hosts(self) -> dict[int, str]:
        """Return the hosts of the ranks that have joined."""
        return {rank: state.host for rank, state in enumerate(self.ranks) if state.host}

    def label(self, plan: WorldPlan) -> None:
        """Describe ranks by their roles in `plan` from now on."""
        for state, rank in zip(self.ranks, plan.ranks, strict=True):
            instance = "" if rank.instance is None else f", instance {rank.instance}"
            state.instance = rank.instance
            state.label = f"rank {rank.rank} ({', '.join(rank.roles)}{instance})"

    def heard_now(self, rank: int) -> None:
        self.ranks[rank].heard = time.monotonic()

    def dead(self) -> list[int]:
        """Return the ranks whose process is known to have ended without saying BYE."""
        ended = self.cut()
        return sorted(
            r
            for r in {*self._here(), *ended}
            if self._is_expected(r) and (r in ended or not runs(self.ranks[r].pid))
        )

    def _report_stopped(self) -> None:
        """Report each rank of this host that somebody has stopped."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_S
        here = {self.ranks[rank].pid: rank for rank in self._here() if rank and self._is_expected(rank)}
        for pid, how in self._stopped_processes.look(here):
            end = f"the run ends after {self._limits.heartbeat:g} s without a heartbeat (--heartbeat_timeout)"
            self._on_event(here[pid], Event("stopped", f"{how}; {end}"))

    def _here(self) -> Sequence[int]:
        """Return the ranks of this host that have joined."""
        return self._by_pids.get(self.ranks[0].pids, ())

    def cut(self) -> frozenset[int]:
        """Return the ranks elsewhere whose process has ended, whether or not they have said BYE."""
        return self._lost_elsewhere | self.lifelines.ended if self.lifelines else self._lost_elsewhere

    def _is_expected(self, rank: int) -> bool:
        """Return whether the rank should be there."""
        return rank not in self._byes and rank not in self._lost

    @property
    def may_go_on(self) -> bool:
        """Whether a loss need not end the run: the test has begun."""
        return self.expendable is not None and self.phase in PHASES[PHASES.index("test") :]

    def lost(self) -> frozenset[int]:
        """Return the ranks of the instances that the run goes on without."""
        return frozenset(self._lost)

    def _sees(self, state: RankState) -> bool:
        return state.pids == self.ranks[0].pids

    def silent(self) -> list[int]:
        """Return the ranks whose heartbeat is missing."""
        now = time.monotonic()
        if now <= self._nobody_silent_until:
            return []
        expected = [(r, s) for r, s in enumerate(self.ranks) if self._is_expected(r)]
        oldest = min((s.heard for _, s in expected), default=now)
        # Beats only come later: until then nobody can have been silent for long enough.
        self._nobody_silent_until = oldest + self._limits.heartbeat
        return [r for r, s in expected if s.pid and s.heard < now - self._limits.heartbeat]

    def gone(self) -> list[int]:
        """Return the ranks that will not answer again: dead or silent."""
        return sorted({*self.dead(), *self.silent()})

    def settle(self, failures: tuple[Failure, ...]) -> tuple[Failure, ...]:
        """Return the failures to report: `failures` and those of the next moment, no mere consequences.

        From now on no phase ends: its work on rank 0 could fail once more, or release ranks that are to end.
        """
        self._ends = True
        end = time.monotonic() + self._time_to_settle(failures)
        while time.monotonic() < end and len(self._failures) < len(self.ranks) - 1:
            self._transport.dispatch_whoever_is_lost()
        if any(failure.code == ExitCode.INSTANCE_LOST for failure in (*failures, *self._failures.values())):
            # Before all ranks have their lifelines, MPI alone may know who it is.
            self._lost_elsewhere = self._transport.known_losses() or self._lost_before_join()
        if gone := self.losses(self.gone()):
            if cut := self._own_network_lost():
                return (cut,)
            said = {failure.rank: failure for failure in failures}
            return tuple(said.get(failure.rank, failure) for failure in gone)
        every = {(f.rank, f.cause): f for f in (*failures, *self._failures.values())}
        if primary := [f for f in every.values() if not f.interrupted]:
            return tuple([f for f in primary if not f.may_follow] or primary)
        # The launcher's signal ends the whole run, even if another rank received it first.
        by_launcher = Interrupted.by_launcher()
        return (by_launcher.failure(),) if by_launcher else tuple(list(every.values())[:1])

    def _lost_before_join(self) -> frozenset[int]:
        """Return the ranks that have ended before rank 0 knew them, as the launcher or the system says."""
        if self.phase != PHASES[0] or self.gone():
            return frozenset()
        end = time.monotonic() + _LAUNCHER_LOOKS_S
        while ROLL_CALL in os.environ and not told_lost() and time.monotonic() < end:
            self._transport.dispatch_whoever_is_lost()
        return frozenset(told_lost() or ended_here())

    def _time_to_settle(self, failures: tuple[Failure, ...]) -> float:
        """Return the seconds to wait: fewer if it is known who is lost, none if Slurm may end the step."""
        if self.dead():
            return 0 if ends_with_a_rank() else _SETTLE_S / 10
        if self.silent():  # the others of its host soon are, too
            return _SETTLE_S + beat_interval_s(len(self.ranks))
        if any(failure.seen for failure in failures):
            return 0
        return _SETTLE_S / 10 if failures[0].interrupted else _SETTLE_S

    def losses(self, ranks: Iterable[int]) -> tuple[Failure, ...]:
        """Return the failures to report for ranks that `gone` or `dead` found."""
        dead = set(self.dead())
        silence = f"no heartbeat for {self._limits.heartbeat:g} s (--heartbeat_timeout)"
        return tuple(
            Failure(
                f"the process has ended; {self.ranks[r].last_seen()}"
                if r in dead
                else f"{silence}{self._if_stopped(r)}; {self._last_seen(r)}",
                r,
                code=ExitCode.INSTANCE_LOST,
                ended=r in dead,
            )
            for r in ranks
        )

    def _own_network_lost(self) -> Failure | None:
        expected = [rank for rank in range(len(self.ranks)) if self._is_expected(rank)]
        lost = own_network_lost(self.hosts(), expected, () if self.dead() else self.silent())
        silence = f"no heartbeat for {self._limits.heartbeat:g} s (--heartbeat_timeout)"
        return Failure(f"{lost}; {silence}", 0, code=ExitCode.INSTANCE_LOST) if lost else None

    def _if_stopped(self, rank: int) -> str:
        how = how_it_is_stopped(self.ranks[rank].pid) if self._sees(self.ranks[rank]) else ""
        return f"; pid {self.ranks[rank].pid} {how}" if how else ""

    def stop_all(self, code: int) -> Stopped | None:
        """Tell every rank to end, and wait; return how rank 0 is to end.

        None: a rank that is not lost did not end within the grace time.
        """
        lost = set(self.gone()) | self._lost.keys()
        stuck = {rank for rank, state in enumerate(self.ranks) if state.beat and state.beat.stack}
        stopped = Stopped(code, finalize=not (lost or stuck - {0}))
        others = set(range(1, len(self.ranks)))
        for rank in self.silent():  # it reads no message, and its launcher would wait for it
            self._kill(rank)
        self.kill_lost()
        end = time.monotonic() + self._limits.grace
        for rank in others - lost:
            with contextlib.suppress(MPI.Exception):  # it may be lost by now
                STOP.send(self._transport, rank, Stop(stopped.code, stopped.finalize))
        while time.monotonic() < end:
            if others <= self._byes | set(self.gone()) | self._lost.keys():
                return stopped
            self._transport.dispatch_whoever_is_lost()
        return None

    # --- a run that goes on without an instance ---

    def _without_who_waits(self, failures: tuple[Failure, ...]) -> tuple[Failure, ...]:
        """Return `failures` without those of instances that may only wait for one whose heartbeat is missing.

        Context and generation instances wait for each other, so the leader finds both silent. It will tell
        again, and in the end the missing heartbeat does.
        """
        now = time.monotonic()
        since = now - _QUIET_BEATS * beat_interval_s(len(self.ranks)) - _QUIET_S
        quiet: dict[int | None, list[int]] = {}  # ranks, by their instance
        for rank, state in enumerate(self.ranks):
            if self._is_expected(rank) and state.heard < since:
                quiet.setdefault(state.instance, []).append(rank)
        blamed = []
        for failure in failures:
            if not quiet or failure.rank not in self._told_of:
                blamed.append(failure)
            elif ranks := quiet.get(self.ranks[failure.rank].instance):
                blamed += [failure] if failure.rank in ranks else self._stopped(ranks, failure)
        return tuple(blamed)

    def _stopped(self, ranks: list[int], told: Failure) -> list[Failure]:
        """Return the failures of ranks without a heartbeat, for which another of the instance was told."""
        now = time.monotonic()
        return [
            dataclasses.replace(
                told, rank=rank, cause=f"no heartbeat for {now - self.ranks[rank].heard:.0f} s; {told.cause}"
            )
            for rank in ranks
        ]

    def _go_on_without(self, failures: tuple[Failure, ...]) -> None:
        """Give up the instances whose ranks have failed. Raises RunError if the run can't go on then."""
        if self.expendable is None or not self.may_go_on:
            raise RunError(*failures)
        lost = self.expendable.give_up(failures)
        now = time.monotonic()
        gone = set(self.gone())
        for instance in lost:
            for rank in instance.ranks:
                self._lost[rank] = now + (0.0 if rank in gone else self._limits.grace)
                if rank not in gone:
                    STOP.send(self._transport, rank, Stop(ExitCode.INSTANCE_LOST, False))
        for instance in lost:
            for rank in range(len(self.ranks)):
                if rank not in self._lost:
                    LOST.send(self._transport, rank, instance)
        for phase in list(self._arrived):
            self._complete(phase)

    def kill_lost(self, now: float = math.inf) -> None:
        """Kill the ranks of lost instances that have not ended within the grace time, or by now."""
        for rank, at in self._lost.items():
            if at <= now and at < math.inf:
                self._lost[rank] = math.inf  # once: its process id may become another's
                if runs(self.ranks[rank].pid):
                    self._kill(rank)

    def _kill(self, rank: int) -> None:
        if rank and self._sees(self.ranks[rank]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.ranks[rank].pid, signal.SIGKILL)

    def _late(self, deadline: float) -> list[Failure]:
        arrived = self._arrived.get(self.phase, {})
        missing = [
            rank for rank in range(len(self.ranks)) if rank not in (arrived.keys() | self._lost.keys())
        ]
        # A stuck rank keeps others waiting: in the test the harness has not arrived, whichever rank is stuck.
        stuck = [
            rank
            for rank, state in enumerate(self.ranks)
            if state.beat and state.beat.stack and rank not in self._lost
        ]
        head = f"phase '{self.phase}' missed its deadline of {deadline:g} s (--{self.phase}_deadline)"
        said = [
            "; ".join(filter(None, (head, self.ranks[rank].does(), self._last_seen(rank))))
            for rank in stuck or missing
        ]
        return [Failure(why, rank) for why, rank in zip(said, stuck or missing, strict=True)]

    def _last_seen(self, rank: int) -> str:
        """Return where a rank was last seen, and before the test which file it read last.

        "" if it waits for something outside, which `does` names.
        """
        if self.ranks[rank].does().startswith(WAITING):
            return ""
        seen = self.ranks[rank].last_seen()
        file = self.last_read(rank) if PHASES.index(self.phase) < PHASES.index("test") else ""
        return f"{seen}\n{file}" if file else seen

    def _on_arrived(self, source: int, message: Arrived) -> None:
        phase, report = message
        self.heard_now(source)
        state = self.ranks[source]
        state.seen = phase
        if phase == PHASES[0]:
            state.host, state.pid, state.pids = report.host, report.pid, report.pids
            self._by_pids.setdefault(report.pids, []).append(source)
        self._arrived.setdefault(phase, {})[source] = report
        self._complete(phase)

    def _complete(self, phase: Phase) -> None:
        """Release the phase if all ranks that are left have done their part."""
        arrived = self._arrived[phase]
        if self._ends or len(arrived) < len(self.ranks) - len(
            self._lost
        ):  # as a rule: at no arrival look at every rank
            return
        left = [rank for rank in range(len(self.ranks)) if rank not in self._lost]
        if not arrived.keys() >= set(left):
            return
        value = self._on_complete(phase, time.monotonic() - self.phase_started, arrived)
        del self._arrived[phase]
        self.phase_started = time.monotonic()
        release = Release(phase, value)
        if phase != PHASES[-1]:
            self.phase = PHASES[PHASES.index(phase) + 1]
            RELEASE.send_all(self._transport, left, release)
            return
        # They leave as soon as they hear of it, which may be before rank 0 looks for its own release.
        self._byes.update(left)
        self._control.outcome = value
        for rank in left:
            with contextlib.suppress(MPI.Exception):  # it is lost by now; the others shall hear of it
                RELEASE.send(self._transport, rank, release)

    def _on_beat(self, source: int, beat: Beat) -> None:
        state = self.ranks[source]
        state.heard = time.monotonic()
        state.beat = beat
        state.seen = beat.phase
        state.measured, state.doing = beat.measured, beat.doing

    def _on_failed(self, source: int, failure: Failure) -> None:
        if source in self._lost or failure.rank in self._lost:
            return
        if failure.seen or not self._failures:
            self._settled_at = time.monotonic() + (0 if failure.seen else _SETTLE_S)
        rank = source if failure.rank is None else failure.rank
        if failure.report is not None:
            self.last_reports[source] = failure.report
        self._failures[rank] = dataclasses.replace(failure, report=None)
        if rank != source:
            self._told_of.add(rank)
