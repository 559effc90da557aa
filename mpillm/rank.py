"""The life of a run on one rank: join, load, health, warmup, ready, test, drain, stop; and how it fails. Needs MPI to be up."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mpi4py import MPI

from disagg.errors import ConfigError
from launch.environment import tell_exit_code
from mpillm import __version__
from mpillm.comms.control import Coordinator, Limits, Member, Stopped, runs
from mpillm.comms.loop import EventLoop
from mpillm.comms.tags import Tag
from mpillm.comms.transport import Transport
from mpillm.comms.watch import Beat, Watch
from mpillm.comms.world import create_communicators
from mpillm.config import RunConfig
from mpillm.cores import BackendRegistry
from mpillm.devices import Gpu, local_gpus
from mpillm.errors import STOP_SIGNALS, ExitCode, Failure, Interrupted, RunError
from mpillm.factory import make_roles
from mpillm.fields import DEADLINES
from mpillm.planning import Setup
from mpillm.report.machine import describe_machine
from mpillm.report.ranklog import open_rank_log
from mpillm.roles.base import Role

if TYPE_CHECKING:
    from mpillm.director import Director

_log = logging.getLogger("mpillm")
_log.addHandler(logging.NullHandler())  # before the rank's log is open, what is logged is told to the person by rank 0 alone


class Rank:
    """One rank, from joining to stopping."""

    def __init__(self, control: MPI.Intracomm, config: RunConfig | None, usage_error: str) -> None:
        """`config`: None when the command line was wrong, for `usage_error`."""
        self.rank, self.size = control.rank, control.size
        watch = self._watch = Watch(control.rank)
        self._control = control
        self._beats = Transport(control)  # the watch's own: a transport belongs to one thread
        self._config = config
        self._usage_error = usage_error
        limits = Limits({phase: float(seconds) for phase, seconds in DEADLINES.items()})
        if config is not None:
            limits = Limits({p: getattr(config, f"{p}_deadline") for p in DEADLINES}, config.grace, config.heartbeat_timeout)
        self._limits = limits
        self._transport = Transport(control)
        self._member = Member(self._transport, watch, limits)
        self._loop = EventLoop(watch)
        self._loop.pollers.append(self._member.poll)
        self._director: Director | None = None
        self._ending = False
        if self.rank == 0:
            from mpillm.director import Director  # LoadGen, data set, console: for this rank alone

            self._director = Director(self._config, self.size)
            self._coordinator = Coordinator(self._member, self.size, time.monotonic() - _process_age_s(), self._director.phase_done)
            self._director.coordinator = self._coordinator
            self._loop.pollers.append(self._coordinator.poll)
        self._roles: list[Role] = []
        self._route: Transport | None = None
        self._gpus: tuple[Gpu, ...] = ()  # of this node, if the core uses any
        self._machine: dict[str, Any] | None = None  # this node, described by its first rank
        self._test_clock = (0.0, 0.0)  # time and CPU time at the test's start
        watch.connect(self._beat, self._stop_requested, self._last_resort)

    # --- the run ---

    def live(self) -> int:
        """All phases; the exit code."""
        try:
            code = self._phases()
        except Stopped as stopped:
            _ignore_stop_signals()
            self._stop_roles()
            self._member.say_bye()
            self._exit(stopped)
        except Interrupted as interrupted:
            self._failed(Failure(f"interrupted by {interrupted.signal_name}", self.rank or None, interrupted=True))
        except ConfigError as error:
            message = self._config.with_sources(str(error)) if self._config else str(error)
            self._failed(Failure(message, self.rank or None, code=ExitCode.USAGE))  # on rank 0 it is about the whole run
        except RunError as error:
            self._failed(*error.failures)
        except Exception as error:  # noqa: BLE001 - whatever it is, it goes to rank 0 and ends the run
            self._failed(self._failure_of(error))
        _ignore_stop_signals()
        if self.rank == 0:
            tell_exit_code(code)
        self._comms.free()
        self._watch.quiet()
        self._finalize()
        return code

    def _phases(self) -> int:
        setup: Setup = self._phase("join", report=self._join_report)
        self._set_up(setup)
        for phase in ("load", "health", "warmup", "ready", "test", "drain"):
            self._phase(phase)
        code = int(self._phase("stop"))
        return code

    def _phase(self, name: str, report: Callable[[], Any] | None = None) -> Any:
        def work() -> None:
            if name == "test":
                gc.freeze()  # what start-up made lives to the end: no collection need look at it while requests wait
                gc.enable()
                self._test_clock = time.perf_counter(), time.process_time()
            for role in self._roles:
                getattr(role, name)()

        return self._member.run_phase(
            self._loop,
            name,
            work,
            lambda: all(role.done(name) for role in self._roles),
            report or (lambda: self._drain_report() if name == "drain" else None),
        )

    def _join_report(self) -> dict[str, Any]:
        if self._config and self._config.device != "cpu" and BackendRegistry.uses_gpus(self._config.core_type):
            self._gpus = local_gpus()
        return {
            "host": MPI.Get_processor_name(),
            "pid": os.getpid(),
            "started": time.time() - _process_age_s(),
            "versions": {
                "mpillm": __version__,
                "Python": platform.python_version(),
                "MPI": MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\0 "),
            },
            "error": self._usage_error,
            "digest": self._config.digest() if self._config else "",
            "values": self._config.values if self._config else {},
            "gpus": self._gpus,
        }

    def _drain_report(self) -> dict[str, Any]:
        """What this rank did in the test, for `result.json`."""
        lasted, cpu = time.perf_counter() - self._test_clock[0], time.process_time() - self._test_clock[1]
        return {
            "roles": [role.report() for role in self._roles],
            "cpu_cores": cpu / lasted,
            "messages": self._route.sent_messages if self._route else 0,
            "message_bytes": self._route.sent_bytes if self._route else 0,
            "machine": self._machine,
        }

    def _set_up(self, setup: Setup) -> None:
        assert self._config is not None
        self._member.host, self._member.rank0 = MPI.Get_processor_name(), setup.rank0
        ranks = setup.plan.ranks
        if all(rank.node != ranks[self.rank].node for rank in ranks[: self.rank]):
            self._machine = describe_machine(self._gpus)  # now: packages may be replaced while the test runs
        try:
            open_rank_log(Path(setup.log_dir), self.rank)
        except OSError as error:
            raise RunError(Failure(f"{error.filename or setup.log_dir}: {error.strerror}")) from error
        self._comms = create_communicators(MPI.COMM_WORLD, self._control, setup.plan)
        self._route = Transport(self._comms.route) if self._comms.route is not None else None
        make_harness = self._director.make_harness if self._director else None
        self._roles = make_roles(self._config, setup, self._comms, self._route, make_harness)
        if self._route:
            self._loop.pollers.append(self._route.dispatch)
        self._loop.pollers.extend(role.poll for role in self._roles)
        if self._director:
            self._loop.pollers.append(self._director.poll)

    # --- failing ---

    def _failure_of(self, error: Exception) -> Failure:
        text = "".join(traceback.format_exception(error))
        _log.error("%s", text)
        if isinstance(error, MPI.Exception):
            return Failure(f"MPI: {error}", self.rank, code=ExitCode.INSTANCE_LOST)
        if isinstance(error, OSError) and error.filename:
            if isinstance(error, PermissionError) and self._watch.phase == "join":  # a file of the person's, on rank 0 of the whole run
                return Failure(f"{error.filename}: {error.strerror}", self.rank or None, code=ExitCode.USAGE)
            return Failure(f"{error.filename}: {error.strerror}", self.rank)
        return Failure(f"{type(error).__name__}: {error}", self.rank, text)

    def _failed(self, *failures: Failure) -> NoReturn:
        """End the run everywhere, because of `failures`."""
        _ignore_stop_signals()
        self._ending = True
        self._watch.enter(self._watch.phase, 3 * self._limits.grace)
        for failure in failures:
            _log.error("%s", failure.cause)
        if self._director is None:
            if cause := self._member.rank0_lost():
                self._say_rank0_lost(cause)
                self._exit(Stopped(ExitCode.INSTANCE_LOST, False))
            stopped = self._member.fail(failures[0])
            self._stop_roles()
            self._member.say_bye()
            self._exit(stopped)
        failures = self._coordinator.settle(failures)
        code = self._director.failed(failures)
        tell_exit_code(code)
        end = self._coordinator.stop_all(code)
        if end is None:
            MPI.COMM_WORLD.Abort(code)
        self._stop_roles()
        self._exit(end or Stopped(code, False))

    def _stop_roles(self) -> None:
        for role in self._roles:
            try:
                role.stop()
            except Exception:  # noqa: BLE001 - the run's first failure has been told; this one goes to the log
                _log.exception("while stopping")

    def _finalize(self) -> None:
        """Leave MPI. It waits for the other ranks and holds Python's lock while it does: only a signal can end that wait."""
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, self._limits.grace)
        MPI.Finalize()
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _exit(self, stopped: Stopped) -> NoReturn:
        """Out of MPI, if the other ranks come along, and out of the process, LoadGen's threads included."""
        code = int(stopped.code)
        self._watch.quiet()
        if stopped.finalize:
            self._finalize()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    # --- the watch's calls, in its thread ---

    def _beat(self, beat: Beat) -> None:
        """Rank 0 tells everybody, everybody tells rank 0."""
        for dest in range(1, self.size) if self.rank == 0 else (0,):
            with contextlib.suppress(MPI.Exception):  # it is lost, and others look after that
                self._beats.send_object(dest, Tag.BEAT, tuple(beat))
        with contextlib.suppress(MPI.Exception):
            self._beats.reap()

    def _stop_requested(self) -> int | None:
        """The exit code, if this rank, whose main thread is stuck, should end: rank 0 has said so, or somebody is lost."""
        if self._ending:
            return None  # the main thread does all this itself
        if self._director is not None:
            lost = self._coordinator.dead()
            if lost:  # the main thread may be waiting for them, in MPI
                code = self._director.failed(self._coordinator.losses(lost))
                tell_exit_code(code)
                for rank in set(range(1, self.size)) - set(lost):
                    with contextlib.suppress(MPI.Exception):
                        self._beats.send_object(rank, Tag.STOP, (code, False))
                return code
            return None
        try:
            while self._beats.take(0, Tag.BEAT):
                self._member.rank0_beat()
            stop = self._beats.take(0, Tag.STOP)
            if stop is not None:
                self._beats.send_object(0, Tag.BYE, None)  # at once: the rank is about to end
                return int(stop.object()[0])
        except MPI.Exception:
            self._beats.acknowledge_losses()
        if cause := self._member.rank0_lost():
            self._say_rank0_lost(cause)
            return ExitCode.INSTANCE_LOST
        return None

    def _say_rank0_lost(self, cause: str) -> None:
        """Rank 0 is there but answers nobody: one of the others tells the person and ends it. If it is gone, its launcher says so."""
        rank0 = self._member.rank0
        if self.rank != 1 or rank0 is None or (rank0[0] == self._member.host and not runs(rank0[1])):
            return
        self._watch.note(f"rank 0 (harness) on {rank0[0]}, pid {rank0[1]}, is lost in phase '{self._watch.phase}': {cause}")
        if rank0[0] == self._member.host:
            os.kill(rank0[1], signal.SIGKILL)

    def _last_resort(self, message: str) -> None:
        """The main thread is stuck, and on other ranks than 0: rank 0 has not ended the run as it should have."""
        code = int(ExitCode.INSTANCE_LOST)
        if self._director is not None:
            code = self._director.failed((Failure(message, self.rank),))
            tell_exit_code(code)
        else:
            self._watch.note(f"{message}\nand rank 0 has not ended the run")
        MPI.COMM_WORLD.Abort(code)
        os._exit(code)


def _ignore_stop_signals() -> None:
    """The rank is ending already, under deadlines."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _process_age_s() -> float:
    """Seconds since this process was started: Python's own start included. 0 where the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return 0.0
