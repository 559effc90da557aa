"""What rank 0 does for all ranks: prepares the run once they have joined, reports, writes the result."""

from __future__ import annotations

from typing import Any

from mpillm.comms.control import Rank0Control, RankControl
from mpillm.comms.messages import JoinReport, Setup
from mpillm.config.options import RunConfig
from mpillm.errors import ExitCode, Failure, exit_code
from mpillm.phases import Phase
from mpillm.report.console import Console
from mpillm.report.result import failures_json
from mpillm.report.run_directory import RunRecord, path_shown, take_directory, unwritable
from mpillm.run.join import Planned, plan_run, prepare
from mpillm.run.session import Session


class Rank0:
    """Rank 0's view of a run. `session` is None until all ranks have joined."""

    def __init__(
        self, control: RankControl, size: int, config: RunConfig | None, started: float, console: Console
    ) -> None:
        """`config`: None if the command line is wrong; `started`: when the process was (time.monotonic)."""
        self._config = config
        self._console = console
        self._record: RunRecord | None = None  # once the run directory exists
        self.session: Session | None = None
        self.control = Rank0Control(control, size, started, self._phase_done)

    def _phase_done(self, phase: Phase, seconds: float, reports: dict[int, Any]) -> Any:
        """All ranks have done `phase`; the value returned is released to all of them."""
        note, value = "", None
        if self.session is None:
            value, note = self._joined(reports), "all ranks agree"
        elif phase == "ready":
            note = self.session.ready()
        elif phase == "drain":
            note = self.session.drained(reports)
        if self._record is not None:
            self._record.phases_s[phase] = round(seconds, 4)
        self._console.phase(phase, seconds, note)
        return self.session.finished() if self.session and phase == "stop" else value

    def _joined(self, reports: dict[int, JoinReport]) -> Setup:
        planned = plan_run(self._config, reports)
        self.control.label(planned.plan)
        prepared = prepare(planned, lambda: self._made_record(planned).path)
        record = self._made_record(planned)
        record.result["loadgen"] = prepared.settings.to_json()
        try:
            self.session = Session(prepared, record, self._console, self.control)
        except OSError as error:
            raise unwritable(planned.config, record.path, error) from error
        for line in prepared.announcement(path_shown(record.path)):
            self._console.line(line)
        return Setup(planned.plan, str(record.path), (reports[0].host, reports[0].pid), planned.gpus)

    def _made_record(self, planned: Planned) -> RunRecord:
        """The run directory, created at the first call."""
        if self._record is None:
            self._record = RunRecord(take_directory(planned.config), planned.config, planned.plan)
        return self._record

    def failed(self, failures: tuple[Failure, ...]) -> int:
        """Print the message and write the result; return the exit code."""
        phase, record = self.control.phase, self._record
        code = exit_code(failures, phase)
        see = ""
        if record is not None:
            record.result |= {
                "status": "FAILED",
                "phase": phase,
                "exit_code": code,
                "failures": failures_json(failures),
            }
            ranks = sorted({f.rank for f in failures if f.rank is not None})
            see = path_shown(
                record.path / "ranks" / f"rank_{ranks[0]:04d}.log" if len(ranks) == 1 else record.path
            )
        if self.session is not None:
            self.session.failed()
        when = f"in phase '{phase}'" if code != ExitCode.USAGE else "before anything was loaded"
        self._console.failure(when, failures, see, lambda rank: self.control.ranks[rank].describe())
        if record is not None:
            try:
                record.write_result()
            except OSError as error:
                self._console.line(f"  result.json in {record.path} can't be written: {error.strerror}")
        return code
