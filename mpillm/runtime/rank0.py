"""Rank 0's work for all ranks: prepare the run after the join, report, and write the result."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from disagg import InstancePlan
from launch.environment import write_directory
from launch.interfaces import own_addresses
from launch.open_files import allow_connections
from mpillm.comms.control import RankControl
from mpillm.comms.instance_loss import InstanceLossPolicy
from mpillm.comms.messages import Event, JoinReport, Rank0At, Setup
from mpillm.comms.rank0_control import Rank0Control
from mpillm.comms.rank_connections import RankConnections
from mpillm.errors import ExitCode, Failure, RunError
from mpillm.options.run_config import RunConfig
from mpillm.phases import PHASES, Phase
from mpillm.report.console import Console
from mpillm.report.run_directory import RunRecord, display_path, failures_json, take_directory
from mpillm.runtime.join import RunPlan, plan_run
from mpillm.runtime.run_session import RunSession
from mpillm.telemetry.rank_log import ended_by_a_loss, how_it_ended, last_read, log_name


class Rank0:
    """Rank 0's view of a run. `session` is None until all ranks have joined."""

    def __init__(
        self,
        control: RankControl,
        size: int,
        config: RunConfig | None,
        started: float,
        console: Console,
        purpose: type[RunSession],
    ) -> None:
        """`config`: None if the command line is wrong; `started`: start of this process (time.monotonic)."""
        self._purpose = purpose
        self._config = config
        self._console = console
        self._record: RunRecord | None = None  # once the run directory exists
        self.session: RunSession | None = None
        self.control = Rank0Control(control, size, started, self._phase_done, self._event)

    def _phase_done(self, phase: Phase, seconds: float, reports: dict[int, Any]) -> Any:
        """Return the value that rank 0 sends to all ranks to end `phase`, which all have completed."""
        note = ""
        value: Any = None
        if self.session is None:
            value, note = self._joined(reports), "all ranks agree"
        elif phase == "load":
            value = {index: url for served in reports.values() for index, url in (served or {}).items()}
        elif phase == "ready":
            note = self.session.ready()
        elif phase == "test":
            self.session.tested()
        elif phase == "drain":
            note = self.session.drained(reports)
        if self._record is not None:
            self._record.phases_s[phase] = round(seconds, 4)
            if phase != PHASES[-1]:
                self._record.write_unfinished(PHASES[PHASES.index(phase) + 1])
        self._console.phase("serve" if self._purpose.serves and phase == "test" else phase, seconds, note)
        return self.session.finished() if self.session and phase == "stop" else value

    def show_waiting(self) -> None:
        """Display the ranks' activities in a long phase before the test. The watch's thread calls this."""
        control = self.control
        if PHASES.index(control.phase) < PHASES.index("test"):
            elapsed = time.monotonic() - control.phase_started
            self._console.waiting(control.phase, elapsed, control.awaited(), control.hosts())

    def _joined(self, reports: dict[int, JoinReport]) -> Setup:
        planned = plan_run(self._config, reports, serves=self._purpose.serves)
        self.control.label(planned.plan)
        record = partial(self._create_record, planned)  # created at first call: not if an option is wrong
        self.session, lines = self._purpose.open(planned, record, self._console, self.control)
        for line in lines:
            if "\n" in line:  # the table of the plan
                self._console.line(line)
            else:
                text = line.lstrip()
                self._console.note(text, line[: len(line) - len(text)])
        rank0 = self._where(reports)
        if planned.outlives_losses:
            self.control.loss_policy = InstanceLossPolicy(planned.plan, self._lost)
        return Setup(
            planned.plan,
            str(record().path),
            rank0,
            planned.gpus,
            secrets.token_hex(8),
            planned.outlives_losses,
            planned.server_gpus,
            {rank: report.port for rank, report in reports.items() if report.port},
            secrets.token_hex(),
            self.session.sends_text,
            _pids(reports),
        )

    def _lost(self, instance: InstancePlan, failure: Failure) -> None:
        """Record the loss of an instance in a run that continues."""
        if self._record is None or self.session is None:
            raise RunError(failure)
        failure = self._with_its_end(failure)
        rank = self.control.ranks[failure.rank or 0].describe()
        self._record.result["lost"].append(
            {
                "instance": instance.index,
                "role": instance.role,
                "ranks": list(instance.ranks),
                "rank": failure.rank,
                "cause": failure.cause,
                "phase": self.control.phase,
                "at_s": round(self.session.lose(instance.index), 3),
            }
        )
        cause = failure.cause.splitlines()[0]
        self._console.note(f"instance {instance.index}: {rank}: {cause}", "  lost    ")

    def _event(self, rank: int, event: Event) -> None:
        """Print an event of a rank."""
        self._console.note(f"{self.control.ranks[rank].describe()}: {event.text}", f"  {event.kind:<7} ")

    def _where(self, reports: dict[int, JoinReport]) -> Rank0At:
        """Return rank 0's location. If ranks cannot see its process, open a port for liveness connections."""
        own = reports[0]
        if any(report.pids != own.pids for report in reports.values()):
            allow_connections(len(reports))  # if not all are allowed, heartbeats report a lost rank
            with contextlib.suppress(OSError):
                self.control.connections = RankConnections(own_addresses())
        connections = self.control.connections
        # A stopped rank 0 must be killed, because the launcher would wait for it.
        seeing = [rank for rank, report in reports.items() if rank and report.pids == own.pids]
        address = connections.address if connections else None
        return Rank0At(own.host, own.pid, own.pids, address, min(seeing, default=1))

    def _create_record(self, planned: RunPlan) -> RunRecord:
        """Return the run directory, created at the first call."""
        if self._record is None:
            config, purpose = planned.config, self._purpose
            path = take_directory(config, purpose.directory_name(config))
            self._record = RunRecord(path, config, planned.plan, purpose.about(config))
            write_directory(path)
            self.control.last_read = lambda rank: last_read(path / log_name(rank))
        return self._record

    def _without_consequences(self, failures: tuple[Failure, ...]) -> tuple[Failure, ...]:
        """Return the failures, except those of ranks that Open MPI ended because of another failure."""
        record = self._record
        if record is None or len(failures) == 1:
            return failures
        followed = {f.rank for f in failures if f.ended and f.rank is not None}
        followed = {rank for rank in followed if ended_by_a_loss(record.path / log_name(rank))}
        return tuple(f for f in failures if f.rank not in followed) or failures

    def _with_its_end(self, failure: Failure) -> Failure:
        """Add the signal that ended a rank's process to its failure, if it is known."""
        if not failure.ended or self._record is None or failure.rank is None:
            return failure
        how = how_it_ended(self._record.path / log_name(failure.rank))
        return replace(failure, cause=f"{failure.cause}\n{how}".rstrip())

    def _serves_until(self, failures: tuple[Failure, ...]) -> bool:
        """Return whether this is the normal end of a server: a signal, after it has served."""
        is_served = self._purpose.serves and self.control.phase in ("test", "drain", "stop")
        return is_served and all(failure.interrupted for failure in failures)

    def failed(self, failures: tuple[Failure, ...], code: int) -> None:
        """Write the result and print the message of a run that ends with exit code `code`."""
        phase, record = self.control.phase, self._record
        failures = tuple(map(self._with_its_end, self._without_consequences(failures)))
        more: list[str] = []
        if self.session is not None and (known := self.session.failed(self.control.last_reports)):
            more.append(known)
        if record is not None:
            if self._serves_until(failures):
                record.result |= {"status": "SERVED", "ended_by": failures[0].cause}
            else:
                record.result |= {
                    "status": "FAILED",
                    "phase": phase,
                    "exit_code": code,
                    "failures": failures_json(failures),
                }
            ranks = sorted({f.rank for f in failures if f.rank is not None})
            where = record.path / log_name(ranks[0]) if len(ranks) == 1 else record.path
            more.append(f"see {display_path(where)}")
        when = f"in phase '{phase}'" if code != ExitCode.USAGE else "before anything was loaded"
        unwritten = ""
        if record is not None:
            try:
                record.write_result()  # first: a launcher may kill this process in a moment
            except OSError as error:
                unwritten = f"  result.json in {record.path} can't be written: {error.strerror}"
        control = self.control
        self._console.failure(
            when, failures, more, lambda rank: control.ranks[rank].describe(), control.hosts()
        )
        if unwritten:
            self._console.line(unwritten)
        elif self.session is not None:
            self.session.page()  # last: a launcher may kill this process in a moment


def _pids(reports: Mapping[int, JoinReport]) -> dict[str, dict[int, int]]:
    """Return `Setup.pids`."""
    pids: dict[str, dict[int, int]] = {}
    for rank, report in reports.items():
        if report.pids:
            pids.setdefault(report.pids, {})[rank] = report.pid
    return pids
