"""Phases, failures and the end of a run, over the control communicator: every rank's part.

A blocking barrier hangs without saying who is missing. So each rank tells rank 0 that it has arrived; rank 0
counts, and releases all of them. If the phase's deadline passes first, rank 0 knows which ranks are missing,
where each was last seen, and its stack. Rank 0's part is `rank0_control`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from launch.siblings import StoppedProcesses, how_it_is_stopped, runs, visible_pids
from mpillm.comms import kept_connections
from mpillm.comms.lifeline import Lifeline
from mpillm.comms.loop import EventLoop
from mpillm.comms.messages import (
    ARRIVED,
    BEAT,
    BYE,
    EVENT,
    FAILED,
    LOST,
    RELEASE,
    STOP,
    Arrived,
    Event,
    Lost,
    Rank0At,
    Release,
    Stop,
)
from mpillm.comms.transport import Transport
from mpillm.comms.watch import Watch
from mpillm.errors import ExitCode, Failure, RunError
from mpillm.phases import PHASES, Phase

_LOOK_INTERVAL_S = 0.005
CHECK_INTERVAL_S = 0.1


class Stopped(Exception):
    """Rank 0 ends the run because it can't go on. `finalize`: no rank is lost, so call MPI_Finalize."""

    def __init__(self, code: int, finalize: bool) -> None:
        super().__init__(code)
        self.code = code
        self.finalize = finalize


@dataclass(frozen=True)
class Limits:
    """Seconds that each phase may take, that the end may take, and that a rank may be silent."""

    phases: dict[Phase, float]
    grace: float = 5.0
    heartbeat: float = 30.0


class RankControl:
    """Every rank's part, rank 0 included: arrive, wait for the release, fail, stop."""

    def __init__(self, transport: Transport, watch: Watch, limits: Limits) -> None:
        self.transport = transport
        self.watch = watch
        self.limits = limits
        self._released: dict[Phase, Any] = {}
        self.outcome: int | None = None
        """The exit code of a run whose last phase has ended: what is lost from then on changes nothing."""
        self.rank0: Rank0At | None = None  # known from the end of join
        self.sees_rank0 = False  # so its process id means something here
        self._stopped_processes = StoppedProcesses()
        self._lifeline: Lifeline | None = None
        self._rank0_heard = self._rank0_checked = time.monotonic()
        self._next_look = self._check_at = 0.0
        self.gone_on_without: list[Lost] = []
        self.on_lost: Callable[[Lost], None] = lambda lost: None
        RELEASE.handle(transport, self._on_release)
        STOP.handle(transport, self._on_stop)
        LOST.handle(transport, self._on_lost)
        if transport.rank != 0:
            BEAT.handle(transport, lambda source, beat: self.rank0_beat())

    def poll(self) -> bool:
        """Handle control messages; rarely during the test: probing costs, and none of them is urgent."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        if self.watch.phase == "test":
            self._next_look = now + _LOOK_INTERVAL_S
        worked = self.transport.dispatch()
        if now >= self._check_at:
            self._check_at = now + CHECK_INTERVAL_S
            away, self._rank0_checked = now - self._rank0_checked, now
            if away > 1:  # its beats of that time may be still unread
                self._rank0_heard = min(now, self._rank0_heard + away)
            self._report_stopped_rank0()
            if cause := self.rank0_lost():
                raise RunError(Failure(cause, 0, code=ExitCode.INSTANCE_LOST))
        return worked

    def watched_pids(self) -> list[int] | None:
        """Return the processes that `poll` looks after; None if one of them can't be seen from here."""
        return [self.rank0.pid] if self.rank0 is not None and self.sees_rank0 else None

    def check_soon(self) -> None:
        """Look after them at the next `poll`: one has ended."""
        self._check_at = 0.0

    def joined(self, rank0: Rank0At) -> None:
        """Begin to look whether rank 0 is there."""
        self.rank0 = rank0
        self.sees_rank0 = rank0.pids == visible_pids()
        if self.sees_rank0:
            if self.transport.rank:
                kept_connections.keep_while(rank0.pid)
            else:
                kept_connections.keep(port=rank0.lifelines.port if rank0.lifelines is not None else 0)
        elif rank0.lifelines is not None:
            self._lifeline = Lifeline(rank0.lifelines, self.transport.rank)

    def quiet_s(self) -> float:
        """Return for how many seconds `poll` has nothing to do unless somebody rings.

        Whoever asks may sleep: `poll` leaves out no look before and after that.
        """
        self._next_look = 0.0
        return self.transport.quiet_s()

    def rank0_lost(self) -> str:
        """Return why rank 0 can no longer end the run, so that this rank must end by itself; "" if it can.

        Any thread may call this.
        """
        if self.transport.rank == 0 or self.rank0 is None:
            return ""
        if self.rank0_ended():
            return "its process has ended"
        if time.monotonic() - self._rank0_heard > self.limits.heartbeat:
            how = how_it_is_stopped(self.rank0.pid) if self.sees_rank0 else ""
            cause = f"no heartbeat for {self.limits.heartbeat:g} s (--heartbeat_timeout)"
            return f"{cause}; pid {self.rank0.pid} {how}" if how else cause
        return ""

    def _report_stopped_rank0(self) -> None:
        """On rank 1: report that somebody has stopped rank 0."""
        if self.transport.rank != 1 or self.rank0 is None or not self.sees_rank0:
            return
        for pid, how in self._stopped_processes.look([self.rank0.pid]):
            self.watch.note(f"rank 0 on {self.rank0.host} (pid {pid}) {how}")

    def rank0_ended(self) -> bool:
        """Return whether rank 0's process is known to have ended."""
        if self.rank0 is None:
            return False
        if self.sees_rank0:
            return not runs(self.rank0.pid)
        return self._lifeline is not None and self._lifeline.ended()

    def rank0_beat(self) -> None:
        """Note that rank 0 is alive."""
        self._rank0_heard = time.monotonic()

    def run_phase(
        self,
        loop: EventLoop,
        phase: Phase,
        work: Callable[[], None],
        done: Callable[[], bool],
        report: Callable[[], Any],
    ) -> Any:
        """Do this rank's part of `phase`, tell rank 0, and wait until all ranks have done theirs.

        Returns the value that rank 0 released it with. The watch's limit is later than rank 0's deadline: it
        ends a rank only if rank 0 could not.
        """
        patience = self.limits.grace * (2 if self.transport.rank == 0 else 4)
        self.watch.enter(phase, self.limits.phases[phase] + patience)
        work()
        loop.run_until(done)
        ARRIVED.send(self.transport, 0, Arrived(phase, report()))
        loop.run_until(lambda: phase in self._released)
        return self._released.pop(phase)

    def fail(self, failure: Failure) -> Stopped:
        """Tell rank 0 that this rank can't go on, and wait, at most the grace time, for its order to stop."""
        end = time.monotonic() + self.limits.grace
        try:
            with contextlib.suppress(MPI.Exception):  # rank 0 itself is lost
                FAILED.send(self.transport, 0, failure)
            while time.monotonic() < end and not self.rank0_lost():
                self.transport.dispatch_whoever_is_lost()
                if self.outcome is not None:
                    return Stopped(self.outcome, False)
        except Stopped as stopped:
            return stopped
        return Stopped(failure.code or ExitCode.NOT_READY, False)

    def say_bye(self) -> None:
        """Tell rank 0 that nothing of the run is left on this rank."""
        with contextlib.suppress(MPI.Exception):  # as in `fail`
            BYE.send(self.transport, 0, None)
            self.transport.flush(1.0)

    def _on_release(self, source: int, release: Release) -> None:
        self._released[release.phase] = release.value
        if release.phase == PHASES[-1]:
            self.outcome = release.value

    def report(self, failure: Failure) -> None:
        """Tell rank 0 of a failure that may be another rank's, and that this rank survives."""
        FAILED.send(self.transport, 0, failure)

    def announce(self, kind: str, text: str) -> None:
        """Have rank 0 print a line on the console."""
        EVENT.send(self.transport, 0, Event(kind, text))

    def _on_lost(self, source: int, lost: Lost) -> None:
        self.transport.forget(lost.ranks)
        self.gone_on_without.append(lost)
        self.on_lost(lost)

    def _on_stop(self, source: int, stop: Stop) -> None:
        raise Stopped(*stop)
