"""End of a run on one rank: a state machine, shared by the main thread and the watch's thread.

    RUNNING ──► REPORTING ──► STOPPING ──► EXITING

A successful run goes from RUNNING to EXITING. A run that rank 0 stops goes from RUNNING to STOPPING. Only the
thread that leaves RUNNING continues. Usually it is the main thread. If the main thread hangs in a backend or
in MPI, it is the watch's thread. `comms.rank0_control` decides the exit code after the loss of a rank.
"""

from __future__ import annotations

import enum
import errno
import logging
import os
import resource
import signal
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from mpi4py import MPI

from disagg.errors import ConfigError
from launch import rank_registry, segments
from launch.environment import write_exit_code
from launch.exits import RankExit, sentence
from launch.launcher import find_launcher
from launch.signals import stop_signals
from mpillm.comms import connection_holder
from mpillm.comms.communicators import Communicators
from mpillm.comms.control import RankControl, RunStopped
from mpillm.comms.messages import BEAT, BYE, STOP, DrainReport, Stop
from mpillm.comms.transport import Transport
from mpillm.errors import STORAGE_ERRORS, ExitCode, Failure, InterruptError, RunError, exit_code
from mpillm.options.run_config import RunConfig
from mpillm.phases import Phase
from mpillm.roles.role import Role

if TYPE_CHECKING:
    from mpillm.runtime.rank0 import Rank0

_log = logging.getLogger("mpillm")
_BEATS_A_LOOK = 4  # rank 0 sends one or two heartbeats between two calls of `_look`


class State(enum.Enum):
    """State of a rank's end."""

    RUNNING = "the phases proceed"
    REPORTING = (
        "rank 0 collects failures and prints the message; another rank has reported and waits for STOP"
    )
    STOPPING = "rank 0 has sent STOP and waits for all ranks; another rank stops its roles"
    EXITING = "finalizes MPI, if no rank is lost, and exits"


def failures_of(
    error: BaseException, rank: int, phase: Phase, config: RunConfig | None
) -> tuple[Failure, ...]:
    """Return the failures of the run for an `error` in the main thread of `rank`.

    On rank 0, a wrong option is a failure of the run, not of a rank.
    """
    rank_or_run = rank or None
    if isinstance(error, InterruptError):
        return (error.failure(rank_or_run),)
    if isinstance(error, ConfigError):
        return (Failure(config.explain(error) if config else str(error), rank_or_run, code=ExitCode.USAGE),)
    if isinstance(error, RunError):
        return error.failures
    text = "".join(traceback.format_exception(error))
    _log.error("%s", text)
    if isinstance(error, MPI.Exception):
        return (Failure(f"MPI: {error}", rank, code=ExitCode.INSTANCE_LOST),)
    # The cause is the limit of open files, not the file that exceeds it.
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (Failure(f"{error.strerror}: this process may open {limit}; raise ulimit -n", rank),)
    if isinstance(error, OSError) and error.filename:
        if isinstance(error, PermissionError) and phase == "join":  # an option names the file
            return (Failure(f"{error.filename}: {error.strerror}", rank_or_run, code=ExitCode.USAGE),)
        return (Failure(f"{error.filename}: {error.strerror}", rank),)
    if isinstance(error, OSError) and error.errno in STORAGE_ERRORS:  # not a programming error
        return (Failure(f"a file cannot be written: {error.strerror}", rank),)
    return (Failure(f"{type(error).__name__}: {error}", rank, text),)


def _explained(failure: Failure) -> Failure:
    """Attach the findings of `mpillm doctor` on this host to a failure."""
    if failure.interrupted:
        return failure
    try:
        from mpillm.doctor.local_checks import explain  # few runs need it

        return replace(failure, doctor=explain(failure.cause))
    except Exception:  # noqa: BLE001 - the checks may fail for the same reason: no file or memory is left
        _log.exception("in the checks of mpillm doctor")
        return failure


class Ending(ABC):
    """End of a rank. The main thread calls `finish`, `stop`, `fail`; the watch's, `end_stuck` and `abort`."""

    def __init__(self, control: RankControl, beats: Transport, roles: Sequence[Role]) -> None:
        """`beats`: the watch's own transport; `roles`: this rank's list of roles, to which it adds later."""
        self.state = State.RUNNING
        self._lock = threading.Lock()  # held to leave RUNNING
        self._control = control
        self._watch = control.watch
        self._timeouts = control.timeouts
        self._beats = beats
        self._roles = roles
        self.directory: Path | None = None  # the run directory, once it is known
        self.last_report: Callable[[], DrainReport] | None = None  # this rank's, once it has roles

    # --- the main thread ---

    def finish(self, code: int, comms: Communicators | None) -> int:
        """Leave the run after the last phase; return the exit code.

        `comms`: None if a rank is lost. Communicators are then not freed, as after the loss of an instance:
        freeing them and MPI_Finalize would wait for the lost ranks.
        """
        self._begin(State.EXITING)
        if self._control.transport.rank == 0:
            write_exit_code(code)
        if comms is None or self._control.lost_instances:
            self._end_lost()
            self._leave(RunStopped(code, finalize=False))
        try:
            comms.free()
        except MPI.Exception:  # a rank has just been lost
            self._leave(RunStopped(code, finalize=False))
        self._watch.quiet()
        self._finalize()
        return code

    def stop(self, stopped: RunStopped) -> NoReturn:
        """End this rank, because rank 0 has sent STOP."""
        self._begin(State.STOPPING)
        self._stop_roles()
        self._leave(stopped)

    def fail(self, failures: tuple[Failure, ...]) -> NoReturn:
        """End the run on every rank, because of `failures`."""
        self._begin(State.REPORTING)
        self._watch.enter(self._watch.phase, 3 * self._timeouts.grace)
        for failure in failures:
            _log.error("%s", failure.cause)
        # Looking takes a moment.
        if self._watch.phase in ("join", "load") and not connection_holder.step_ends_with_a_rank():
            failures = tuple(_explained(failure) for failure in failures)
        stopped = self._report(failures)
        self.state = State.STOPPING
        self._stop_roles()
        self._leave(stopped)

    def _begin(self, state: State) -> None:
        """Leave RUNNING. If the watch's thread has done so before, wait until it ends the process."""
        for number in stop_signals():
            signal.signal(number, signal.SIG_IGN)  # the rank is already ending, under deadlines
        patience = 3 * self._timeouts.grace
        if self._lock.acquire(timeout=patience):
            first = self.state is State.RUNNING
            self.state = state if first else self.state
            self._lock.release()
            if first:
                return
            time.sleep(patience)
        os._exit(ExitCode.INSTANCE_LOST)

    def _end_lost(self) -> None:  # noqa: B027 - rank 0 alone does it
        """Kill the remaining ranks of lost instances."""

    @abstractmethod
    def _report(self, failures: tuple[Failure, ...]) -> RunStopped:
        """End the run on the other ranks; return how this rank must end."""

    def _interrupted_report(self, failures: tuple[Failure, ...]) -> DrainReport | None:
        """Return this rank's report if a signal ends the test, as it usually does for a server."""
        interrupted = all(failure.interrupted for failure in failures)
        if self.last_report is None or self._watch.phase != "test" or not interrupted:
            return None
        try:
            return self.last_report()
        except Exception:  # noqa: BLE001 - the signal can come at any moment; the run ends without a report
            _log.exception("in the report of this rank")
            return None

    def _stop_roles(self) -> None:
        """Stop this rank's roles."""
        for role in reversed(self._roles):
            try:
                role.stop()
            except Exception:  # noqa: BLE001 - the run's first failure is reported; this one is logged
                _log.exception("while stopping")

    def _leave(self, stopped: RunStopped) -> NoReturn:
        """Finalize MPI, if no rank is lost, and exit the process, including LoadGen's threads."""
        self.state = State.EXITING
        self._watch.quiet()
        rank_registry.deregister()
        if stopped.finalize:
            self._finalize()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        if self._control.transport.rank == 0:
            connection_holder.let_task_end()
        os._exit(int(stopped.code))

    def _finalize(self) -> None:
        """Finalize MPI, which waits for the other ranks and holds the GIL: only a signal can end the wait."""
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, self._timeouts.grace)
        try:
            MPI.Finalize()
        except MPI.Exception as error:  # ULFM counts an earlier exit as a loss; all is reported
            _log.warning("MPI_Finalize: %s", error)
        segments.forget()
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection_holder.stop()

    # --- the watch's thread ---

    def end_stuck(self) -> int | None:
        """Return the exit code if this rank must end now, although its main thread is stuck; otherwise None.

        The rank ends if rank 0 has sent STOP, or if a rank is lost.
        """
        with self._lock:
            if self.state is not State.RUNNING:
                return None  # the main thread ends the rank itself
            code = self._look()
            if code is not None:
                self.state = State.EXITING
            return code

    @abstractmethod
    def _look(self) -> int | None:
        """Implement `end_stuck`. Before it returns a code, do everything that must precede the exit."""

    def abort(self, message: str) -> NoReturn:
        """Abort MPI: the main thread has exceeded its time limit, and rank 0 has not ended the run."""
        with self._lock:
            self.state = State.EXITING
        code = self._report_stuck(message)
        MPI.COMM_WORLD.Abort(code)
        os._exit(code)

    @abstractmethod
    def _report_stuck(self, message: str) -> int:
        """Report `message`; return the exit code."""


class RankEnding(Ending):
    """Ends every rank but 0."""

    def _report(self, failures: tuple[Failure, ...]) -> RunStopped:
        if cause := self._control.rank0_lost():
            self._report_rank0_lost(cause)
            self._leave(RunStopped(ExitCode.INSTANCE_LOST, False))
        return self._control.fail(replace(failures[0], report=self._interrupted_report(failures)))

    def _stop_roles(self) -> None:
        super()._stop_roles()
        self._control.send_bye()

    def _look(self) -> int | None:
        try:
            # The number of reads is limited: on busy CPU cores, heartbeats may arrive as fast as this thread
            # reads them, and it must also send its own.
            for _ in range(_BEATS_A_LOOK):
                if BEAT.take(self._beats, 0) is None:
                    break
                self._control.rank0_beat()
            if (stop := STOP.take(self._beats, 0)) is not None:
                BYE.send(self._beats, 0, None)  # immediately: the rank is about to exit
                return stop.code
        except MPI.Exception:
            self._beats.acknowledge_losses()
        if cause := self._control.rank0_lost():
            self._report_rank0_lost(cause)
            return ExitCode.INSTANCE_LOST
        return None

    def _report_stuck(self, message: str) -> int:
        self._watch.note(f"{message}\nand rank 0 has not ended the run")
        return ExitCode.INSTANCE_LOST

    def _report_rank0_lost(self, cause: str) -> None:
        """Report the loss of rank 0.

        If rank 0 has exited, its launcher reports the loss. srun reports only tasks, so under srun one rank
        reports the loss. If rank 0 is silent, its `reporter` reports the loss and kills rank 0.
        """
        rank0 = self._control.rank0
        if rank0 is None:
            return
        if self._control.rank0_has_exited():
            launcher = find_launcher()
            if launcher is not None and launcher.is_srun and self.directory is not None:
                from mpillm.report import postmortem  # few runs need it

                where, rank = (self.directory, rank0.host, rank0.pid), self._control.transport.rank
                if text := postmortem.amend_for_rank0(*where, rank, ExitCode.INSTANCE_LOST):
                    self._watch.note(text)
            return
        if self._control.transport.rank != rank0.reporter:
            return
        how = f"was lost in phase '{self._watch.phase}': {cause}"
        self._watch.note(sentence([RankExit(0, rank0.host, rank0.pid, how)]))
        if self._control.sees_rank0:
            with suppress(ProcessLookupError):
                os.kill(rank0.pid, signal.SIGKILL)


class Rank0Ending(Ending):
    """Ends rank 0, and the run on all ranks."""

    def __init__(self, control: RankControl, beats: Transport, roles: Sequence[Role], rank0: Rank0) -> None:
        super().__init__(control, beats, roles)
        self._rank0 = rank0
        self._code: int | None = None  # exit code, once the failure is reported

    def _report(self, failures: tuple[Failure, ...]) -> RunStopped:
        if (report := self._interrupted_report(failures)) is not None:
            self._rank0.control.last_reports[0] = report
        code = self._report_to_user(self._rank0.control.settle(failures))
        self.state = State.STOPPING
        stopped = self._rank0.control.stop_all(code)
        if stopped is None:
            MPI.COMM_WORLD.Abort(code)
        return stopped or RunStopped(code, False)

    def _end_lost(self) -> None:
        self._rank0.control.kill_lost()

    def _look(self) -> int | None:
        lost = self._rank0.control.exited()
        # If the run continues, the main thread waits for none of the lost ranks.
        if not lost or self._rank0.control.may_continue:
            return None
        # The main thread may be waiting for the lost ranks in MPI.
        code = self._report_to_user(self._rank0.control.losses(lost))
        for rank in set(range(1, len(self._rank0.control.ranks))) - set(lost):
            with suppress(MPI.Exception):
                STOP.send(self._beats, rank, Stop(code, False))
        return code

    def _report_stuck(self, message: str) -> int:
        if self._code is not None:  # the failure is reported; stopping the other ranks took too long
            self._watch.note(message)
            return self._code
        return self._report_to_user((Failure(message, 0),))

    def _report_to_user(self, failures: tuple[Failure, ...]) -> int:
        self._code = exit_code(failures, self._rank0.control.phase)
        write_exit_code(self._code)  # first: a launcher may kill this process in a moment
        self._rank0.failed(failures, self._code)
        return self._code
