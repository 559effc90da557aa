"""Rank 0's part of phases, failures and the end of a run: see `control`."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from mpi4py import MPI

from disagg import WorldPlan
from launch.environment import read_lost
from launch.rank_registry import REGISTRY_ADDRESS
from launch.siblings import ended_here, how_it_is_stopped, runs
from mpillm.comms.connection_holder import step_ends_with_a_rank
from mpillm.comms.control import CHECK_INTERVAL_S, RankControl, RunStopped
from mpillm.comms.instance_loss import InstanceLossPolicy
from mpillm.comms.messages import (
    ARRIVED,
    BEAT,
    BYE,
    EVENT,
    FAILED,
    LOST,
    RELEASE,
    STOP,
    STOPPED,
    WAITING,
    Arrival,
    Beat,
    DrainReport,
    Event,
    Release,
    Stop,
    StoppedRank,
)
from mpillm.comms.own_network import has_link, look_at_networks, own_network_lost
from mpillm.comms.rank_connections import RankConnections
from mpillm.comms.rank_state import RankState
from mpillm.comms.watch import beat_interval_s
from mpillm.errors import ExitCode, Failure, InterruptError, RunError
from mpillm.phases import PHASES, Phase

_QUIET_BEATS, _QUIET_S = 3, 3.0  # without a heartbeat for 3 intervals and 3 s, a rank may be stopped
_LAUNCHER_LOOKS_S = 1.0  # wait for the launcher's files, which it updates four times in this time
_SETTLE_S = 0.5  # after the first failure, for other failures with the same cause


class Rank0Control:
    """Rank 0's additional part: counts arrivals, releases phases, enforces deadlines, ends the run."""

    def __init__(
        self,
        control: RankControl,
        size: int,
        started: float,
        on_complete: Callable[[Phase, float, dict[int, Any]], Any],
        on_event: Callable[[int, Event], None] = lambda rank, event: None,
    ) -> None:
        """`started`: when the first phase started (time.monotonic).

        `on_complete(phase, seconds, reports by rank)` is called when all ranks have done their part of the
        phase. Its result is released to all. `on_event(rank, event)` is called for each event of a rank.
        """
        self._control = control
        self._transport = control.transport
        self._timeouts = control.timeouts
        self._on_complete = on_complete
        self.ranks = [RankState(f"rank {rank}") for rank in range(size)]
        self.phase = PHASES[0]
        self.phase_started = started
        self._arrived: dict[Phase, dict[int, Any]] = {}
        self._failures: dict[int, Failure] = {}
        self.last_reports: dict[int, DrainReport] = {}  # of a test that a signal ends
        self.last_read: Callable[[int], str] = lambda rank: ""
        """Returns the file that a rank read last, for the cause of a failure; "" if unknown."""
        self._reported_by_others: set[int] = set()  # ranks whose failures another rank has reported
        self._settled_at = 0.0
        self._ends = False  # whether the run ends with a failure
        self._checked = time.monotonic()
        self._check_at = self._checked + CHECK_INTERVAL_S
        self._byes: set[int] = {0}
        self._by_pids: dict[str, list[int]] = {}  # ranks that have joined, by `RankState.pids`
        self._no_silence_until = 0.0
        self.loss_policy: InstanceLossPolicy | None = None  # None: the loss of a rank ends the run
        # Ranks of lost instances, and when (time.monotonic) they are killed.
        self._lost: dict[int, float] = {}
        self._n_exited_elsewhere = 0
        self._lost_elsewhere: frozenset[int] = frozenset()  # as MPI or the launcher reports; set at the end
        self.connections: RankConnections | None = None  # of ranks on other hosts
        ARRIVED.handle(self._transport, self._on_arrived)
        BEAT.handle(self._transport, self._on_beat)
        FAILED.handle(self._transport, self._on_failed)
        EVENT.handle(self._transport, on_event)
        STOPPED.handle(self._transport, lambda source, stopped: self.report_stopped(stopped))
        self._on_event = on_event
        BYE.handle(self._transport, lambda source, _: self._byes.add(source))

    def poll(self) -> bool:
        """Check deadlines and heartbeats. Raises RunError if the run cannot continue."""
        if self._control.outcome is not None:
            return False
        now = time.monotonic()
        if now < self._check_at and len(self.exited_elsewhere()) == self._n_exited_elsewhere:
            return False
        self._check_at = now + CHECK_INTERVAL_S
        self._n_exited_elsewhere = len(self.exited_elsewhere())
        away, self._checked = now - self._checked, now
        if away > 1:
            # Heartbeats that arrived while rank 0 was busy may be unread. That time does not count.
            for state in self.ranks:
                state.last_message_at = min(now, state.last_message_at + away)
        self.note_alive(0)
        if losses := self.losses(self.unresponsive()):
            self._continue_without(losses)
        if self._failures and now > self._settled_at:
            failures = tuple(self._failures.values())
            self._failures.clear()
            if failures := self._without_waiting_ranks(failures):
                self._continue_without(failures)
        self.kill_lost(now)
        deadline = self._timeouts.phases[self.phase]
        if now - self.phase_started > deadline and not self._failures:
            raise RunError(*self._deadline_failures(deadline))
        return False

    def watched_pids(self) -> list[int] | None:
        """Return the pids that `poll` checks; None if a rank has no visible process and no connection."""
        visible = [state.pid for state in self.ranks[1:] if self._sees(state)]
        return visible if self.connections is not None or len(visible) == len(self.ranks) - 1 else None

    def check_soon(self) -> None:
        """Check the `watched_pids` at the next `poll`: one process has exited."""
        self._check_at = 0.0

    def awaited(self) -> dict[str, list[int]]:
        """Return the ranks that have not arrived at the end of the phase, by their activity.

        Any thread may call this.
        """
        by_activity: dict[str, list[int]] = {}
        arrived = {*self._arrived.get(self.phase, ()), *self._lost}
        for rank, state in enumerate(self.ranks):
            if rank not in arrived:
                by_activity.setdefault(state.doing, []).append(rank)
        return by_activity

    def hosts(self) -> dict[int, str]:
        """Return the hosts of the ranks that have joined."""
        return {rank: state.host for rank, state in enumerate(self.ranks) if state.host}

    def label(self, plan: WorldPlan) -> None:
        """From now on, describe ranks by their roles in `plan`."""
        for state, rank in zip(self.ranks, plan.ranks, strict=True):
            instance = "" if rank.instance is None else f", instance {rank.instance}"
            state.instance = rank.instance
            state.label = f"rank {rank.rank} ({', '.join(rank.roles)}{instance})"

    def note_alive(self, rank: int) -> None:
        self.ranks[rank].last_message_at = time.monotonic()

    def exited(self) -> list[int]:
        """Return the ranks whose process has exited without BYE, as far as rank 0 has detected it."""
        elsewhere = self.exited_elsewhere()
        return sorted(
            r
            for r in {*self._here(), *elsewhere}
            if self._is_expected(r) and (r in elsewhere or not runs(self.ranks[r].pid))
        )

    def report_stopped(self, stopped: StoppedRank) -> None:
        """Report a rank whose process is stopped (SIGSTOP). Any thread may call this."""
        if not self._is_expected(stopped.rank):
            return
        self.ranks[stopped.rank].how_stopped = stopped.how
        end = f"the run ends after {self._timeouts.heartbeat:g} s without a heartbeat (--heartbeat_timeout)"
        self._on_event(stopped.rank, Event("stopped", f"{stopped.how}; {end}"))

    def _here(self) -> Sequence[int]:
        """Return the ranks of this host that have joined."""
        return self._by_pids.get(self.ranks[0].pids, ())

    def exited_elsewhere(self) -> frozenset[int]:
        """Return the ranks of other hosts whose process has exited, with or without BYE."""
        return self._lost_elsewhere | self.connections.exited if self.connections else self._lost_elsewhere

    def _is_expected(self, rank: int) -> bool:
        """Return whether the rank's process should run."""
        return rank not in self._byes and rank not in self._lost

    def _expected(self) -> list[int]:
        return [*filter(self._is_expected, range(len(self.ranks)))]

    @property
    def may_continue(self) -> bool:
        """Whether the run may survive a loss: the test has begun."""
        return self.loss_policy is not None and self.phase in PHASES[PHASES.index("test") :]

    def lost(self) -> frozenset[int]:
        """Return the ranks of the lost instances."""
        return frozenset(self._lost)

    def _sees(self, state: RankState) -> bool:
        return state.pids == self.ranks[0].pids

    def silent(self) -> list[int]:
        """Return the ranks whose next heartbeat is overdue."""
        now = time.monotonic()
        if now <= self._no_silence_until:
            return []
        expected = [(r, s) for r, s in enumerate(self.ranks) if self._is_expected(r)]
        oldest = min((s.last_message_at for _, s in expected), default=now)
        # The times of last messages only increase, so no rank is silent before this time.
        self._no_silence_until = oldest + self._timeouts.heartbeat
        return [r for r, s in expected if s.pid and s.last_message_at < now - self._timeouts.heartbeat]

    def unresponsive(self) -> list[int]:
        """Return the ranks that have exited or are silent."""
        return sorted({*self.exited(), *self.silent()})

    def settle(self, failures: tuple[Failure, ...]) -> tuple[Failure, ...]:
        """Return the failures to report: `failures` and simultaneous ones, except consequences of others.

        From now on, no phase ends: rank 0's work at its end could fail again, or release ranks that must end.
        """
        self._ends = True
        end = time.monotonic() + self._settle_time_s(failures)
        while time.monotonic() < end and len(self._failures) < len(self.ranks) - 1:
            self._transport.dispatch_despite_losses()
        if any(failure.code == ExitCode.INSTANCE_LOST for failure in (*failures, *self._failures.values())):
            # Before all ranks have liveness connections, only MPI or the launcher may identify the lost rank.
            self._lost_elsewhere = self._transport.known_losses() or self._lost_before_join()
        if losses := self.losses(self.unresponsive()):
            if network := self._own_network_lost():
                return (network,)
            by_rank = {failure.rank: failure for failure in failures}
            return tuple(by_rank.get(failure.rank, failure) for failure in losses)
        every = {(f.rank, f.cause): f for f in (*failures, *self._failures.values())}
        if primary := [f for f in every.values() if not f.interrupted]:
            return tuple([f for f in primary if not f.may_follow] or primary)
        # The launcher's signal ends the whole run, even if another rank received it first.
        by_launcher = InterruptError.by_launcher()
        return (by_launcher.failure(),) if by_launcher else tuple(list(every.values())[:1])

    def _lost_before_join(self) -> frozenset[int]:
        """Return the ranks that exited before they joined, as the launcher or the system reports."""
        if self.phase != PHASES[0] or self.unresponsive():
            return frozenset()
        end = time.monotonic() + _LAUNCHER_LOOKS_S
        while REGISTRY_ADDRESS in os.environ and not read_lost() and time.monotonic() < end:
            self._transport.dispatch_despite_losses()
        return frozenset(read_lost() or ended_here())

    def _settle_time_s(self, failures: tuple[Failure, ...]) -> float:
        """Return the seconds to wait: fewer if the lost rank is known, 0 if Slurm may end the step."""
        if self.exited():
            return 0 if step_ends_with_a_rank() else _SETTLE_S / 10
        if self.silent():  # the other ranks of the silent rank's host will soon be silent also
            return _SETTLE_S + beat_interval_s(len(self.ranks))
        if any(failure.seen for failure in failures):
            return 0
        return _SETTLE_S / 10 if failures[0].interrupted else _SETTLE_S

    def losses(self, ranks: Collection[int]) -> tuple[Failure, ...]:
        """Return the failures to report for ranks from `unresponsive` or `exited`."""
        if not ranks:  # usually; what follows looks at every rank
            return ()
        exited = set(self.exited())
        silence = f"no heartbeat for {self._timeouts.heartbeat:g} s (--heartbeat_timeout)"
        if not any(map(self._if_stopped, ranks)):
            silence += look_at_networks(self.hosts(), self._expected(), ranks)
        return tuple(
            Failure(
                f"the process has ended; {self.ranks[r].last_seen()}"
                if r in exited
                else f"{silence}{self._if_stopped(r)}; {self._last_seen(r)}",
                r,
                code=ExitCode.INSTANCE_LOST,
                ended=r in exited,
            )
            for r in ranks
        )

    def _own_network_lost(self) -> Failure | None:
        silent = () if self.exited() else self.silent()
        if any(self.ranks[rank].how_stopped for rank in silent):
            return None
        lost = own_network_lost(self.hosts(), self._expected(), silent, has_link)
        silence = f"no heartbeat for {self._timeouts.heartbeat:g} s (--heartbeat_timeout)"
        return Failure(f"{lost}; {silence}", 0, code=ExitCode.INSTANCE_LOST) if lost else None

    def _if_stopped(self, rank: int) -> str:
        state = self.ranks[rank]
        how = how_it_is_stopped(state.pid) if self._sees(state) else state.how_stopped
        return f"; pid {state.pid} {how}" if how else ""

    def stop_all(self, code: int) -> RunStopped | None:
        """Send STOP to every rank, and wait; return how rank 0 must end.

        None: a rank that is not lost has not ended within the grace time.
        """
        lost = set(self.unresponsive()) | self._lost.keys()
        stuck = {rank for rank, state in enumerate(self.ranks) if state.beat and state.beat.stack}
        stopped = RunStopped(code, finalize=not (lost or stuck - {0}))
        others = set(range(1, len(self.ranks)))
        for rank in self.silent():  # a silent rank reads no messages, and the launcher would wait for it
            self._kill(rank)
        self.kill_lost()
        end = time.monotonic() + self._timeouts.grace
        for rank in others - lost:
            with contextlib.suppress(MPI.Exception):  # the rank may be lost by now
                STOP.send(self._transport, rank, Stop(stopped.code, stopped.finalize))
        while time.monotonic() < end:
            if others <= self._byes | set(self.unresponsive()) | self._lost.keys():
                return stopped
            self._transport.dispatch_despite_losses()
        return None

    # --- a run that continues without an instance ---

    def _without_waiting_ranks(self, failures: tuple[Failure, ...]) -> tuple[Failure, ...]:
        """Return `failures` without instances that may only wait for an instance without a heartbeat.

        Context and generation instances wait for each other, so the leader reports both as stalled. No
        failure is lost: the leader repeats its report, and finally the missing heartbeat is a failure.
        """
        now = time.monotonic()
        since = now - _QUIET_BEATS * beat_interval_s(len(self.ranks)) - _QUIET_S
        quiet: dict[int | None, list[int]] = {}  # ranks, by their instance
        for rank, state in enumerate(self.ranks):
            if self._is_expected(rank) and state.last_message_at < since:
                quiet.setdefault(state.instance, []).append(rank)
        causes = []
        for failure in failures:
            if not quiet or failure.rank not in self._reported_by_others:
                causes.append(failure)
            elif ranks := quiet.get(self.ranks[failure.rank].instance):
                causes += [failure] if failure.rank in ranks else self._heartbeat_failures(ranks, failure)
        return tuple(causes)

    def _heartbeat_failures(self, ranks: list[int], reported: Failure) -> list[Failure]:
        """Return failures of ranks without a heartbeat, in place of their instance's `reported` failure."""
        now = time.monotonic()
        return [
            dataclasses.replace(
                reported,
                rank=rank,
                cause=f"no heartbeat for {now - self.ranks[rank].last_message_at:.0f} s; {reported.cause}",
            )
            for rank in ranks
        ]

    def _continue_without(self, failures: tuple[Failure, ...]) -> None:
        """Remove the instances whose ranks have failed. Raises RunError if the run cannot continue."""
        if self.loss_policy is None or not self.may_continue:
            raise RunError(*failures)
        lost = self.loss_policy.remove(failures)
        now = time.monotonic()
        unresponsive = set(self.unresponsive())
        for instance in lost:
            for rank in instance.ranks:
                self._lost[rank] = now + (0.0 if rank in unresponsive else self._timeouts.grace)
                if rank not in unresponsive:
                    STOP.send(self._transport, rank, Stop(ExitCode.INSTANCE_LOST, False))
        for instance in lost:
            for rank in range(len(self.ranks)):
                if rank not in self._lost:
                    LOST.send(self._transport, rank, instance)
        for phase in list(self._arrived):
            self._complete(phase)

    def kill_lost(self, now: float = math.inf) -> None:
        """Kill the ranks of lost instances whose grace time has ended by `now`."""
        for rank, at in self._lost.items():
            if at <= now and at < math.inf:
                self._lost[rank] = math.inf  # only once: its process id may be reused
                if runs(self.ranks[rank].pid):
                    self._kill(rank)

    def _kill(self, rank: int) -> None:
        if rank and self._sees(self.ranks[rank]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.ranks[rank].pid, signal.SIGKILL)

    def _deadline_failures(self, deadline: float) -> list[Failure]:
        arrived = self._arrived.get(self.phase, {})
        missing = [
            rank for rank in range(len(self.ranks)) if rank not in (arrived.keys() | self._lost.keys())
        ]
        # A stuck rank keeps others waiting. In the test, the harness is missing, whichever rank is stuck.
        stuck = [
            rank
            for rank, state in enumerate(self.ranks)
            if state.beat and state.beat.stack and rank not in self._lost
        ]
        head = f"phase '{self.phase}' missed its deadline of {deadline:g} s (--{self.phase}_deadline)"
        causes = [
            "; ".join(filter(None, (head, self.ranks[rank].activity(), self._last_seen(rank))))
            for rank in stuck or missing
        ]
        return [Failure(why, rank) for why, rank in zip(causes, stuck or missing, strict=True)]

    def _last_seen(self, rank: int) -> str:
        """Return a rank's last phase, and before the test also the file that it read last.

        "" if the rank waits for a program outside the run, which `activity` names.
        """
        if self.ranks[rank].activity().startswith(WAITING):
            return ""
        seen = self.ranks[rank].last_seen()
        file = self.last_read(rank) if PHASES.index(self.phase) < PHASES.index("test") else ""
        return f"{seen}\n{file}" if file else seen

    def _on_arrived(self, source: int, message: Arrival) -> None:
        phase, report = message
        self.note_alive(source)
        state = self.ranks[source]
        state.seen = phase
        if phase == PHASES[0]:
            state.host, state.pid, state.pids = report.host, report.pid, report.pids
            self._by_pids.setdefault(report.pids, []).append(source)
        self._arrived.setdefault(phase, {})[source] = report
        self._complete(phase)

    def _complete(self, phase: Phase) -> None:
        """Release the phase if all remaining ranks have done their part."""
        arrived = self._arrived[phase]
        if self._ends or len(arrived) < len(self.ranks) - len(self._lost):  # quick: no look at every rank
            return
        remaining = [rank for rank in range(len(self.ranks)) if rank not in self._lost]
        if not arrived.keys() >= set(remaining):
            return
        value = self._on_complete(phase, time.monotonic() - self.phase_started, arrived)
        del self._arrived[phase]
        self.phase_started = time.monotonic()
        release = Release(phase, value)
        if phase != PHASES[-1]:
            self.phase = PHASES[PHASES.index(phase) + 1]
            RELEASE.send_all(self._transport, remaining, release)
            return
        # Ranks exit when they receive the release, which may be before rank 0 reads its own release.
        self._byes.update(remaining)
        self._control.outcome = value
        for rank in remaining:
            with contextlib.suppress(MPI.Exception):  # the rank is lost by now
                RELEASE.send(self._transport, rank, release)

    def _on_beat(self, source: int, beat: Beat) -> None:
        state = self.ranks[source]
        state.last_message_at = time.monotonic()
        state.how_stopped = ""
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
            self._reported_by_others.add(rank)
