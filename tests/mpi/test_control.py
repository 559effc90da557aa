"""Phases, failures and the end of a run, by the ranks of this world."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from launch.environment import EXIT_FILE, write_signal
from mpillm.comms.control import RankControl, RunStopped, Timeouts
from mpillm.comms.loop import EventLoop
from mpillm.comms.messages import Event, JoinReport, Rank0At
from mpillm.comms.rank0_control import Rank0Control
from mpillm.comms.transport import Envelope, Transport
from mpillm.comms.wakeup_socket import WakeupSocket
from mpillm.errors import ExitCode, Failure, RunError
from mpillm.phases import PHASES, Phase

pytestmark = pytest.mark.mpi(min_size=2)


class QuietWatch:
    """Watches nothing."""

    phase = "start"

    def tick(self) -> None: ...

    def enter(self, phase: str, limit_s: float) -> None:
        self.phase = phase


class Rank:
    """Holds its control, and on rank 0 that of all ranks, too."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        deadline: float = 20.0,
        transport: Callable[[MPI.Intracomm], Any] = Transport,
    ) -> None:
        watch: Any = QuietWatch()
        timeouts = Timeouts(dict.fromkeys(PHASES, deadline), grace=5.0, heartbeat=60.0)
        self.rank, self.size = comm.rank, comm.size
        self.control = RankControl(transport(comm), watch, timeouts)
        self.loop = EventLoop(watch, WakeupSocket())
        self.loop.pollers.append(self.control.poll)
        self.events: list[tuple[int, Event]] = []
        self.completed: list[tuple[str, float, dict[int, Any]]] = []
        if comm.rank == 0:
            self.rank0 = Rank0Control(self.control, comm.size, time.monotonic(), self.complete, self.on_event)
            self.loop.pollers.append(self.rank0.poll)

    def complete(self, phase: str, seconds: float, reports: dict[int, Any]) -> str | int:
        self.completed.append((phase, seconds, reports))
        return 4 if phase == PHASES[-1] else f"released {phase}"

    def on_event(self, rank: int, event: Event) -> None:
        self.events.append((rank, event))

    def phase(self, name: Phase, slow: float = 0.0) -> Any:
        """Take part in a phase, done only after `slow` seconds."""
        end = time.monotonic() + slow
        report = JoinReport("here", os.getpid(), 0.0, {"rank": str(self.rank)})
        return self.control.run_phase(
            self.loop, name, lambda: None, lambda: time.monotonic() >= end, lambda: report
        )

    def wait_for_stop(self) -> RunStopped:
        """Look for messages only, as a rank that is busy with something else."""
        with pytest.raises(RunStopped) as stopped:
            end = time.monotonic() + 20
            while time.monotonic() < end:
                self.control.transport.dispatch()
        self.control.send_bye()
        return stopped.value

    def end(self, code: ExitCode) -> None:
        """End the run on rank 0; all others follow."""
        if self.rank == 0:
            stopped = self.rank0.stop_all(code)
            assert stopped is not None
            assert (stopped.code, stopped.finalize) == (code, True)


@pytest.fixture
def comm() -> Iterator[MPI.Intracomm]:
    made = MPI.COMM_WORLD.Dup()
    yield made
    made.Barrier()
    made.Free()


def test_all_phases(comm: MPI.Intracomm) -> None:
    rank = Rank(comm)
    rank.control.announce("back", f"server {comm.rank}")
    for phase in PHASES[:-1]:
        assert rank.phase(phase) == f"released {phase}"
    assert rank.phase(PHASES[-1]) == 4
    if comm.rank:  # what it finds from now on, rank 0 need not hear, nor does it wait for an order to stop
        stopped = rank.control.fail(Failure("MPI: process failure", comm.rank))
        assert (stopped.code, stopped.finalize) == (4, False)
    if comm.rank == 0:
        assert sorted(rank.events) == [(r, ("back", f"server {r}")) for r in range(comm.size)]
        assert [phase for phase, _, _ in rank.completed] == list(PHASES)
        for _, seconds, reports in rank.completed:
            assert 0 <= seconds < 300
            assert {r: report.versions["rank"] for r, report in reports.items()} == {
                r: str(r) for r in range(comm.size)
            }


def test_no_rank_is_released_before_all_have_arrived(comm: MPI.Intracomm) -> None:
    rank = Rank(comm)
    rank.phase("join")
    last, slow = comm.size - 1, 0.4
    began = time.monotonic()
    rank.phase("load", slow=slow if comm.rank == last else 0.0)
    released = time.monotonic()
    assert released >= comm.bcast(began, last) + slow  # all have this host's clock


def test_a_deadline_names_the_missing_rank(comm: MPI.Intracomm) -> None:
    rank = Rank(comm, deadline=1.0)
    rank.phase("join")
    missing = comm.size - 1
    if comm.rank == 0:
        start = time.monotonic()
        with pytest.raises(RunError) as error:
            rank.phase("load")
        assert 0.8 < time.monotonic() - start < 300
        (failure,) = error.value.failures
        assert failure.rank == missing
        assert "phase 'load' missed its deadline of 1 s (--load_deadline)" in failure.cause
        rank.end(ExitCode.NOT_READY)
    elif comm.rank == missing:
        assert rank.wait_for_stop().code == ExitCode.NOT_READY
    else:
        with pytest.raises(RunStopped) as stopped:
            rank.phase("load")
        assert stopped.value.code == ExitCode.NOT_READY
        rank.control.send_bye()


class BereavedTransport(Transport):
    """Reports lost ranks, as the control communicator does under ULFM until they are acknowledged."""

    losses = 0

    def poll(self) -> Envelope | None:
        if self.losses:
            self.losses -= 1
            raise MPI.Exception(MPI.ERR_OTHER)
        return super().poll()


@pytest.mark.parametrize("losses", [0, 3])
def test_failures_travel_and_end_the_run_everywhere(comm: MPI.Intracomm, losses: int) -> None:
    """Every rank but 0 fails, and rank 0 learns of all in one error, also when another loss is reported
    meanwhile."""
    transport = BereavedTransport(comm)
    rank = Rank(comm, transport=lambda _: transport)
    rank.phase("join")
    transport.losses = losses if comm.rank else 0
    if comm.rank == 0:
        with pytest.raises(RunError) as error:
            rank.phase("load")
        failures = rank.rank0.settle(error.value.failures)
        assert {(f.rank, f.cause, f.traceback) for f in failures} == {
            (r, f"broken {r}", "trace") for r in range(1, comm.size)
        }
        rank.end(ExitCode.TEST_FAILED)
    else:
        stopped = rank.control.fail(Failure(f"broken {comm.rank}", comm.rank, "trace"))
        assert (stopped.code, stopped.finalize) == (ExitCode.TEST_FAILED, True)
        rank.control.send_bye()


def test_an_interrupt_is_reported_once_and_never_hides_a_cause(
    comm: MPI.Intracomm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(comm)
    rank.phase("join")
    if comm.rank == 0:
        mine = Failure("interrupted by SIGTERM", 0, interrupted=True)
        end = time.monotonic() + 10
        while len(rank.rank0._failures) < comm.size - 1:
            assert time.monotonic() < end
            rank.control.transport.dispatch()
        assert [f.cause for f in rank.rank0.settle((mine,))] == ["the cause"]
        rank.rank0._failures = {r: Failure("interrupted", r, interrupted=True) for r in range(1, comm.size)}
        assert rank.rank0.settle((mine,)) == (mine,)
        # The launcher's signal is about the whole run, also when it reaches another rank first.
        monkeypatch.setenv(EXIT_FILE, str(tmp_path / "exit"))
        write_signal(signal.SIGTERM, tmp_path / "exit")
        other = Failure("interrupted (SIGTERM)", 1, interrupted=True)
        assert rank.rank0.settle((other,)) == (Failure("interrupted (SIGTERM)", code=143, interrupted=True),)
        rank.end(ExitCode.NOT_READY)
    else:
        cause = (
            Failure("the cause", 1) if comm.rank == 1 else Failure("interrupted", comm.rank, interrupted=True)
        )
        rank.control.fail(cause)
        rank.control.send_bye()


def test_a_process_that_is_gone_is_noticed(comm: MPI.Intracomm) -> None:
    rank = Rank(comm)
    rank.phase("join")
    if comm.rank == 0:
        state = rank.rank0.ranks[1]
        assert rank.rank0.unresponsive() == []
        child = os.fork()
        if child == 0:
            os._exit(0)
        state.pid = child  # a zombie, then nothing
        end = time.monotonic() + 10
        while rank.rank0.unresponsive() != [1]:
            assert time.monotonic() < end
        os.waitpid(child, 0)
        assert rank.rank0.unresponsive() == [1]
        with pytest.raises(RunError) as error:
            rank.phase("load")
        assert (error.value.failures[0].rank, error.value.failures[0].code) == (1, ExitCode.INSTANCE_LOST)


def test_a_silent_rank_0_is_reported_as_lost(comm: MPI.Intracomm) -> None:
    rank = Rank(comm)
    rank.phase("join")
    if comm.rank != 0:
        rank.control.timeouts = Timeouts(dict.fromkeys(PHASES, 20.0), grace=5.0, heartbeat=0.5)
        rank.control.joined(Rank0At("another host", 1, "not seen from here", None))
        end = time.monotonic() + 10
        with pytest.raises(RunError) as error:
            rank.loop.run_until(lambda: time.monotonic() > end)
        assert (error.value.failures[0].rank, error.value.failures[0].code) == (0, ExitCode.INSTANCE_LOST)
