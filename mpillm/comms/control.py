"""Phases, failures and the end of a run, over the control communicator: every rank's part.

A blocking barrier would hang without naming the missing ranks. So each rank sends rank 0 a message when it
has done its part of a phase. Rank 0 counts these messages, and releases all ranks. If the phase's deadline
passes first, rank 0 can name the missing ranks, with the last phase and the stack of each. Rank 0's part is
`rank0_control`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from launch.siblings import how_it_is_stopped, runs, visible_pids
from mpillm.comms import connection_holder
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
    Arrival,
    Event,
    InstanceLoss,
    Rank0At,
    Release,
    Stop,
)
from mpillm.comms.rank_connections import Rank0Connection
from mpillm.comms.transport import Transport
from mpillm.comms.watch import Watch
from mpillm.errors import ExitCode, Failure, RunError
from mpillm.phases import PHASES, Phase

_LOOK_INTERVAL_S = 0.005
CHECK_INTERVAL_S = 0.1


class RunStopped(Exception):
    """Rank 0 ends the run because of a failure. `finalize`: no rank is lost, so call MPI_Finalize."""

    def __init__(self, code: int, finalize: bool) -> None:
        super().__init__(code)
        self.code = code
        self.finalize = finalize


@dataclass(frozen=True)
class Timeouts:
    """Maximum seconds of each phase, of the end of a run, and between messages of a rank."""

    phases: dict[Phase, float]
    grace: float = 5.0
    heartbeat: float = 30.0


class RankControl:
    """Every rank's part, rank 0 included: arrive, wait for the release, fail, stop."""

    def __init__(self, transport: Transport, watch: Watch, timeouts: Timeouts) -> None:
        self.transport = transport
        self.watch = watch
        self.timeouts = timeouts
        self._released: dict[Phase, Any] = {}
        self.outcome: int | None = None
        """Exit code of a run whose last phase has ended. Later losses do not change it."""
        self.rank0: Rank0At | None = None  # None until the end of join
        self.sees_rank0 = False  # whether rank 0's process id is valid here
        self._rank0_connection: Rank0Connection | None = None
        self._rank0_message_at = self._rank0_checked = time.monotonic()
        self._next_look = self._check_at = 0.0
        self.lost_instances: list[InstanceLoss] = []
        self.on_lost: Callable[[InstanceLoss], None] = lambda lost: None
        RELEASE.handle(transport, self._on_release)
        STOP.handle(transport, self._on_stop)
        LOST.handle(transport, self._on_lost)
        if transport.rank != 0:
            BEAT.handle(transport, lambda source, beat: self.rank0_beat())

    def poll(self) -> bool:
        """Handle control messages: rarely in the test, because a probe takes time, and nothing is urgent."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        if self.watch.phase == "test":
            self._next_look = now + _LOOK_INTERVAL_S
        worked = self.transport.dispatch()
        if now >= self._check_at:
            self._check_at = now + CHECK_INTERVAL_S
            away, self._rank0_checked = now - self._rank0_checked, now
            if away > 1:  # rank 0's heartbeats of that time may still be unread
                self._rank0_message_at = min(now, self._rank0_message_at + away)
            if cause := self.rank0_lost():
                raise RunError(Failure(cause, 0, code=ExitCode.INSTANCE_LOST))
        return worked

    def watched_pids(self) -> list[int] | None:
        """Return the processes that `poll` checks; None if rank 0's process is not visible here."""
        return [self.rank0.pid] if self.rank0 is not None and self.sees_rank0 else None

    def check_soon(self) -> None:
        """Check the `watched_pids` at the next `poll`: one process has exited."""
        self._check_at = 0.0

    def joined(self, rank0: Rank0At) -> None:
        """Start to watch rank 0."""
        self.rank0 = rank0
        self.sees_rank0 = rank0.pids == visible_pids()
        if self.sees_rank0:
            if self.transport.rank:
                connection_holder.hold_until_exit(rank0.pid)
            else:
                connection_holder.hold(port=rank0.address.port if rank0.address is not None else 0)
        elif rank0.address is not None:
            self._rank0_connection = Rank0Connection(rank0.address, self.transport.rank)

    def quiet_s(self) -> float:
        """Return the seconds for which `poll` has no work unless a wake-up arrives.

        The caller may then sleep, so the next `poll` looks for messages in any case.
        """
        self._next_look = 0.0
        return self.transport.quiet_s()

    def rank0_lost(self) -> str:
        """Return why rank 0 cannot end the run, so that this rank must exit by itself; "" if rank 0 can.

        Any thread may call this.
        """
        if self.transport.rank == 0 or self.rank0 is None:
            return ""
        if self.rank0_has_exited():
            return "its process has ended"
        if time.monotonic() - self._rank0_message_at > self.timeouts.heartbeat:
            how = how_it_is_stopped(self.rank0.pid) if self.sees_rank0 else ""
            cause = f"no heartbeat for {self.timeouts.heartbeat:g} s (--heartbeat_timeout)"
            return f"{cause}; pid {self.rank0.pid} {how}" if how else cause
        return ""

    def rank0_has_exited(self) -> bool:
        """Return whether rank 0's process has exited, as far as this rank can detect it."""
        if self.rank0 is None:
            return False
        if self.sees_rank0:
            return not runs(self.rank0.pid)
        return self._rank0_connection is not None and self._rank0_connection.has_exited()

    def rank0_beat(self) -> None:
        """Note a heartbeat of rank 0."""
        self._rank0_message_at = time.monotonic()

    def run_phase(
        self,
        loop: EventLoop,
        phase: Phase,
        work: Callable[[], None],
        done: Callable[[], bool],
        report: Callable[[], Any],
    ) -> Any:
        """Do this rank's part of `phase`, report it to rank 0, and wait until all ranks have done theirs.

        Returns the value of rank 0's release. The watch's limit is later than rank 0's deadline: the watch
        ends a rank only if rank 0 has not ended the run.
        """
        patience = self.timeouts.grace * (2 if self.transport.rank == 0 else 4)
        self.watch.enter(phase, self.timeouts.phases[phase] + patience)
        work()
        loop.run_until(done)
        ARRIVED.send(self.transport, 0, Arrival(phase, report()))
        loop.run_until(lambda: phase in self._released)
        return self._released.pop(phase)

    def fail(self, failure: Failure) -> RunStopped:
        """Report a failure of this rank to rank 0, and wait at most the grace time for STOP."""
        end = time.monotonic() + self.timeouts.grace
        try:
            with contextlib.suppress(MPI.Exception):  # rank 0 itself is lost
                FAILED.send(self.transport, 0, failure)
            while time.monotonic() < end and not self.rank0_lost():
                self.transport.dispatch_despite_losses()
                if self.outcome is not None:
                    return RunStopped(self.outcome, False)
        except RunStopped as stopped:
            return stopped
        return RunStopped(failure.code or ExitCode.NOT_READY, False)

    def send_bye(self) -> None:
        """Report to rank 0 that this rank has released everything of the run."""
        with contextlib.suppress(MPI.Exception):  # as in `fail`
            BYE.send(self.transport, 0, None)
            self.transport.flush(1.0)

    def _on_release(self, source: int, release: Release) -> None:
        self._released[release.phase] = release.value
        if release.phase == PHASES[-1]:
            self.outcome = release.value

    def report(self, failure: Failure) -> None:
        """Report a failure, maybe of another rank, to rank 0. This rank continues."""
        FAILED.send(self.transport, 0, failure)

    def announce(self, kind: str, text: str) -> None:
        """Send rank 0 a line for the console."""
        EVENT.send(self.transport, 0, Event(kind, text))

    def _on_lost(self, source: int, lost: InstanceLoss) -> None:
        self.transport.forget(lost.ranks)
        self.lost_instances.append(lost)
        self.on_lost(lost)

    def _on_stop(self, source: int, stop: Stop) -> None:
        raise RunStopped(*stop)
