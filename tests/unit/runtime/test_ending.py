"""The state machine of a run's end, with a control, a watch and a process that only note what is done."""

from __future__ import annotations

import logging
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from mpi4py import MPI

from disagg.errors import ConfigError
from launch.environment import EXIT_FILE, read_exit_code
from mpillm.comms import transport
from mpillm.comms.control import RunStopped, Timeouts
from mpillm.comms.messages import BEAT, STOP, Beat, Rank0At, Stop
from mpillm.comms.tags import Tag
from mpillm.comms.transport import Envelope
from mpillm.errors import ExitCode, Failure, InterruptError, RunError
from mpillm.options.fields import DEADLINES
from mpillm.runtime import ending
from mpillm.runtime.ending import Ending, Rank0Ending, RankEnding, State, failures_of

BROKEN = (Failure("broken", 2, "trace"),)
GRACE_S = 0.05


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Have a launcher that reads rank 0's exit code."""
    monkeypatch.setenv(EXIT_FILE, str(tmp_path / "exit_code"))


class Ended(BaseException):
    """Stands for the end of the process."""


class World:
    """Stands for one rank's surroundings; `events` has what happened, in order."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, rank: int, finalize: Callable[[], None] | None = None
    ) -> None:
        self.events: list[str] = []
        self._exit_code: int | None = None
        self._exit_file = Path(os.environ[EXIT_FILE])
        self._exit_file.unlink(missing_ok=True)
        self.states: list[State] = []
        self.messages: list[Envelope] = []  # for the watch's transport
        # what telling rank 0, or stopping all, comes to
        self.stopped: RunStopped | None = RunStopped(ExitCode.NOT_READY, True)
        self.rank0_lost = ""
        self.exited: list[int] = []
        watch = SimpleNamespace(
            phase="load",
            enter=lambda *_: None,
            quiet=self.note("quiet"),
            note=lambda text: self.event(f"note {text}"),
        )
        transport = SimpleNamespace(rank=rank)
        control: Any = SimpleNamespace(
            transport=transport, watch=watch, timeouts=Timeouts(DEADLINES, grace=GRACE_S), lost_instances=[],
            sees_rank0=True, rank0=Rank0At("here", 1, "", None),
            rank0_has_exited=lambda: False,
            rank0_lost=lambda: self.rank0_lost, rank0_beat=self.note("beat"),
            fail=lambda failure: self.did("told rank 0", self.stopped), send_bye=self.note("bye"),
        )  # fmt: skip
        of_all = SimpleNamespace(
            ranks=range(3),
            phase="load",
            exited=lambda: self.exited,
            may_continue=False,
            kill_lost=self.note("kill lost"),
            losses=lambda ranks: tuple(Failure("lost", rank, code=5) for rank in ranks),
            settle=lambda failures: failures,
            stop_all=lambda code: self.did("stop all", self.stopped),
        )
        rank0: Any = SimpleNamespace(
            control=of_all,
            failed=lambda failures, code: self.did(f"told {failures[0].cause}", None),
        )
        beats: Any = SimpleNamespace(
            take=self.take,
            send=lambda dest, tag, buffer: self.event(f"{Tag(tag).name} to {dest}"),
            acknowledge_losses=lambda: None,
        )
        roles: Any = [SimpleNamespace(stop=self.note("role stops"))]
        self.ending: Ending = (
            Rank0Ending(control, beats, roles, rank0) if rank == 0 else RankEnding(control, beats, roles)
        )
        mpi = SimpleNamespace(
            Exception=MPI.Exception,
            Finalize=finalize or self.note("finalize"),
            COMM_WORLD=SimpleNamespace(Abort=self.abort),
        )
        monkeypatch.setattr(ending, "MPI", mpi)
        monkeypatch.setattr(
            ending,
            "os",
            SimpleNamespace(_exit=self.exit, kill=lambda pid, number: self.event(f"kill {pid}")),
        )
        names = {
            name: getattr(signal, name)
            for name in ("SIG_IGN", "SIG_DFL", "SIGALRM", "SIGKILL", "ITIMER_REAL")
        }
        monkeypatch.setattr(
            ending, "signal", SimpleNamespace(signal=lambda *_: None, setitimer=lambda *_: None, **names)
        )
        monkeypatch.setattr(logging, "shutdown", lambda: None)

    def event(self, text: str) -> None:
        """Note an event, behind the exit code that the launcher has got by then."""
        code = read_exit_code(self._exit_file)
        if code != self._exit_code:
            self._exit_code = code
            self.events.append(f"launcher {code}")
        self.events.append(text)

    def note(self, event: str) -> Any:
        return lambda *_: self.did(event, None)

    def did(self, event: str, value: Any) -> Any:
        self.event(event)
        self.states.append(self.ending.state)
        return value

    def take(self, source: int, tag: Tag, tries: int) -> Envelope | None:
        for received in self.messages:
            if (received.source, received.tag) == (source, tag):
                self.messages.remove(received)
                return received
        return None

    def exit(self, code: int) -> None:
        self.event(f"exit {int(code)}")
        raise Ended

    def abort(self, code: int) -> None:
        self.event(f"abort {int(code)}")
        raise Ended

    def ended(self, call: Any, *arguments: Any) -> list[str]:
        """Return the events of a call that ends the process."""
        with pytest.raises(Ended):
            call(*arguments)
        return self.events


def test_a_failing_rank_reports_to_rank_0_and_waits_to_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 2)
    assert world.ended(world.ending.fail, BROKEN) == [
        "told rank 0",
        "role stops",
        "bye",
        "quiet",
        "finalize",
        "exit 3",
    ]
    assert world.states == [State.REPORTING, State.STOPPING, State.STOPPING, State.EXITING, State.EXITING]


def test_a_rank_that_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 2)
    assert world.ended(world.ending.stop, RunStopped(4, finalize=False)) == [
        "role stops",
        "bye",
        "quiet",
        "exit 4",
    ]


def test_rank_0_prints_the_failure_and_stops_all(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 0)
    events = ["launcher 3", "told broken", "stop all", "role stops", "quiet", "finalize", "exit 3"]
    assert world.ended(world.ending.fail, BROKEN) == events
    assert world.states == [State.REPORTING, State.STOPPING, State.STOPPING, State.EXITING, State.EXITING]


def test_a_rank_that_ended_sooner_changes_nothing_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """ULFM takes it for a lost one in MPI_Finalize."""

    def finalize() -> None:
        raise MPI.Exception(MPI.ERR_PROC_FAILED)

    world = World(monkeypatch, 0, finalize)
    assert world.ended(world.ending.fail, BROKEN)[-1] == "exit 3"


def test_rank_0_aborts_when_a_rank_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 0)
    world.stopped = None
    assert world.ended(world.ending.fail, BROKEN) == ["launcher 3", "told broken", "stop all", "abort 3"]


def test_without_rank_0_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, events in (
        (2, ["quiet", "exit 5"]),
        (
            1,
            [
                "note rank 0 on here (pid 1) was lost in phase 'load': silent",
                "kill 1",
                "quiet",
                "exit 5",
            ],
        ),
    ):
        world = World(monkeypatch, rank)
        world.rank0_lost = "silent"
        assert world.ended(world.ending.fail, BROKEN) == events
        world = World(monkeypatch, rank)
        world.rank0_lost = "silent"
        assert world.ending.end_stuck() == ExitCode.INSTANCE_LOST
        assert world.events == events[:-2]


@pytest.mark.parametrize(("rank", "launcher"), [(0, ["launcher 0"]), (2, [])])
def test_a_run_that_ends_well(monkeypatch: pytest.MonkeyPatch, rank: int, launcher: list[str]) -> None:
    world = World(monkeypatch, rank)
    comms: Any = SimpleNamespace(free=world.note("free"))
    assert world.ending.finish(0, comms) == 0
    assert world.events == [*launcher, "free", "quiet", "finalize"]
    assert world.ending.state is State.EXITING


def test_a_rank_lost_after_the_last_phase_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI has said so before, or does while communicators are freed; nobody waits for the lost one."""
    world = World(monkeypatch, 0)
    assert world.ended(world.ending.finish, 0, None) == ["launcher 0", "kill lost", "quiet", "exit 0"]
    world = World(monkeypatch, 2)

    def free() -> None:
        raise MPI.Exception(MPI.ERR_OTHER)

    assert world.ended(world.ending.finish, 4, SimpleNamespace(free=free)) == ["quiet", "exit 4"]


def test_a_stuck_rank_ends_when_rank_0_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 2)
    assert world.ending.end_stuck() is None and world.ending.state is State.RUNNING
    beat = Envelope(0, Tag.BEAT, BEAT.write(Beat("load", 0.0, "")))
    world.messages += [beat, beat, Envelope(0, Tag.STOP, STOP.write(Stop(4, True)))]
    assert world.ending.end_stuck() == 4
    assert world.events == ["beat", "beat", "BYE to 0"]


class BusyMachine:
    """A communicator where others take the cores: Open MPI gives them its own at each look."""

    rank = 2
    beat = BEAT.write(Beat("load", 0.0, ""))

    def __init__(self) -> None:
        self.now, self.beats = 0.0, 0

    def Improbe(self, source: int, tag: int, status: object) -> Any:
        self.now += 0.022
        assert self.now < 60, "the looks do not end"
        if tag != Tag.BEAT or self.now < 0.5 * (self.beats + 1):
            return None
        self.beats += 1
        return SimpleNamespace(Recv=lambda to: np.copyto(to[0], self.beat))


def test_a_stuck_rank_of_a_busy_machine_soon_beats_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as it has looked 32 times, the next heartbeat of rank 0 may be there."""
    world, machine = World(monkeypatch, 2), BusyMachine()
    monkeypatch.setattr(transport, "time", SimpleNamespace(monotonic=lambda: machine.now))
    world.ending._beats = transport.Transport(cast(MPI.Intracomm, machine))
    world.ending._beats._status = cast(MPI.Status, SimpleNamespace(Get_count=lambda _: machine.beat.nbytes))
    for _ in range(20):
        began = machine.now
        assert world.ending.end_stuck() is None
        assert machine.now - began < 0.5, "the watch sends no beat meanwhile"
        machine.now += 0.5
    assert len(world.events) > 18, "it has heard of rank 0"


def test_rank_0_ends_while_stuck_if_a_process_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 0)
    assert world.ending.end_stuck() is None
    world.exited = [1]
    assert world.ending.end_stuck() == 5
    assert world.events == ["launcher 5", "told lost", "STOP to 2"]


@pytest.mark.parametrize("rank", [0, 2])
def test_the_watch_yields_to_the_main_thread(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Messages are the main thread's as well: it reads a STOP."""
    world = World(monkeypatch, rank)
    world.exited, world.rank0_lost, world.ending.state = [1], "silent", State.REPORTING
    world.messages.append(Envelope(0, Tag.STOP, STOP.write(Stop(4, True))))
    assert world.ending.end_stuck() is None
    assert world.events == [] and len(world.messages) == 1


@pytest.mark.parametrize("rank", [0, 2])
def test_the_main_thread_yields_to_the_watch(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Nothing is reported twice; the main thread gives the watch time to end the process."""
    for call in ("fail", "finish", "stop"):
        world = World(monkeypatch, rank)
        world.exited = [1]
        world.messages.append(Envelope(0, Tag.STOP, STOP.write(Stop(5, True))))
        assert world.ending.end_stuck() == 5
        world.events.clear()
        arguments = {"fail": (BROKEN,), "finish": (0, None), "stop": (RunStopped(5, True),)}[call]
        began = time.monotonic()
        assert world.ended(getattr(world.ending, call), *arguments) == ["exit 5"]
        assert time.monotonic() - began >= 3 * GRACE_S


def test_the_last_resort_prints_the_failure_unless_it_was_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 0)
    assert world.ended(world.ending.abort, "stuck") == ["launcher 3", "told stuck", "abort 3"]
    world = World(monkeypatch, 0)
    world.stopped = None
    world.ended(world.ending.fail, (Failure("broken", code=143),))
    world.events.clear()
    assert world.ended(world.ending.abort, "stuck") == ["note stuck", "abort 143"]
    world = World(monkeypatch, 2)
    assert world.ended(world.ending.abort, "stuck") == [
        "note stuck\nand rank 0 has not ended the run",
        "abort 5",
    ]


@pytest.mark.parametrize(
    ("error", "rank", "expected"),
    [
        (InterruptError("Ctrl-C", 2), 0, Failure("interrupted (Ctrl-C)", None, code=130, interrupted=True)),
        (InterruptError("SIGTERM", 15), 3, Failure("interrupted (SIGTERM)", 3, interrupted=True)),
        (ConfigError("--x: wrong"), 0, Failure("--x: wrong", None, code=ExitCode.USAGE)),
        (ConfigError("--x: wrong"), 3, Failure("--x: wrong", 3, code=ExitCode.USAGE)),
        (RunError(*BROKEN), 3, BROKEN[0]),
        (
            MPI.Exception(MPI.ERR_OTHER),
            3,
            Failure(f"MPI: {MPI.Exception(MPI.ERR_OTHER)}", 3, code=ExitCode.INSTANCE_LOST),
        ),
        (OSError(28, "No space left on device", "/f"), 3, Failure("/f: No space left on device", 3)),
        (
            OSError(28, "No space left on device"),
            3,
            Failure("a file cannot be written: No space left on device", 3),
        ),
    ],
)
def test_errors_become_failures(error: BaseException, rank: int, expected: Failure) -> None:
    assert failures_of(error, rank, "load", None) == (expected,)


@pytest.mark.parametrize("filename", [(), ("leader.py",)])
def test_too_few_open_files_name_the_limit(filename: tuple[str, ...]) -> None:
    """The file that is not opened is not to blame, and neither is the program."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    error = OSError(24, "Too many open files", *filename)
    expected = Failure(f"Too many open files: this process may open {limit}; raise ulimit -n", 3)
    assert failures_of(error, 3, "load", None) == (expected,)


def test_a_file_that_may_not_be_read_is_a_wrong_option_until_all_have_joined() -> None:
    error = PermissionError(13, "Permission denied", "/f")
    assert failures_of(error, 0, "join", None) == (
        Failure("/f: Permission denied", None, code=ExitCode.USAGE),
    )
    assert failures_of(error, 0, "load", None) == (Failure("/f: Permission denied", 0),)
    (unknown,) = failures_of(ZeroDivisionError("x"), 3, "test", None)
    assert (unknown.cause, unknown.rank, unknown.code) == ("ZeroDivisionError: x", 3, None)
    assert unknown.traceback.endswith("ZeroDivisionError: x\n")


def test_what_cannot_be_explained_is_reported_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """For "Too many open files" even looking at the machine fails."""
    failure = Failure("Too many open files")
    ending._explained(failure)  # it imports what it needs
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        assert ending._explained(failure) == failure
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "in the checks of mpillm doctor" in caplog.text
