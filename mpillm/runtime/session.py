"""Rank 0's view of a run once all ranks have joined: the harness, the progress, the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpillm.comms.loop import EventLoop
from mpillm.comms.messages import DrainReport
from mpillm.comms.rank0_control import Rank0Control
from mpillm.cores.registry import BackendRegistry
from mpillm.errors import ExitCode, Failure, RunError
from mpillm.loadgen.audit import prepare_audit
from mpillm.loadgen.logs import advice, unsatisfied, verdict
from mpillm.loadgen.sut import LoadGenTest
from mpillm.options.run_config import RunConfig
from mpillm.report.arrivals import arrival_figures
from mpillm.report.console import Console
from mpillm.report.goodput import goodput
from mpillm.report.page.run_analysis import Facts
from mpillm.report.repeats import repeated_prompts
from mpillm.report.request_log import read_requests
from mpillm.report.result import summary_rows
from mpillm.report.run_directory import RunRecord
from mpillm.report.validity_checks import failed_checks
from mpillm.roles.harness import RequestSource
from mpillm.runtime.join import RunPlan, RunSetup, prepare
from mpillm.runtime.load_session import LoadSession
from mpillm.runtime.run_session import announced, opened


class Session(LoadSession):
    """Session of a test that LoadGen drives."""

    @classmethod
    def open(
        cls, planned: RunPlan, record: Callable[[], RunRecord], console: Console, control: Rank0Control
    ) -> tuple[Session, list[str]]:
        prepared = prepare(planned, lambda: record().path)
        session = opened(lambda: Session(prepared, record(), console, control), planned, record)
        return session, announced(planned, record().path, prepared.announcement())

    @classmethod
    def about(cls, config: RunConfig) -> dict[str, object]:
        return {"loadgen_result": None, "scenario": config.scenario, "test_mode": config.test_mode}

    def __init__(
        self, prepared: RunSetup, record: RunRecord, console: Console, control: Rank0Control
    ) -> None:
        """Write the plan to the run directory. Raises OSError if one of its files can't be written."""
        config = prepared.planned.config
        self._prepared = prepared
        scaled = config.workload.n_samples if config.workload and config.workload.scaled else None
        # Path of LoadGen's audit.config, or "".
        self._audit = prepare_audit(config.compliance_test, config.audit_conf, record.path, scaled)
        super().__init__(prepared, record, console, control)
        (record.path / "user.conf").write_text(prepared.settings.user_conf, encoding="utf-8")
        record.result["loadgen"] = prepared.settings.to_json()

    def source(self, loop: EventLoop) -> RequestSource:
        settings, n_samples = self._prepared.settings, len(self._prepared.dataset)
        return LoadGenTest(settings.test, n_samples, self._record.path, self._audit, loop)

    def expected(self) -> tuple[int | None, float | None]:
        forecast = self._prepared.settings.forecast
        return forecast.queries, forecast.seconds

    # --- after a phase of all ranks: a note for the console ---

    def tested(self) -> None:
        """Read LoadGen's verdict now: it is reported even if a rank is lost before the ranks report."""
        directory = self._record.path
        judged = verdict(directory, self._config.test_mode)
        if judged is None:
            raise RunError(
                Failure(f"LoadGen's logs in {directory} are missing or incomplete: is the disk full?")
            )
        self._record.result["loadgen_result"] = judged

    def drained(self, reports: dict[int, DrainReport]) -> str:
        """Store LoadGen's verdict and the ranks' reports in the result."""
        self.close_files()
        directory, result = self._record.path, self._record.result
        judged = result["loadgen_result"]
        result |= {"status": judged, "loadgen_unsatisfied": unsatisfied(directory)}
        result["loadgen_advice"] = advice(directory) if judged == "INVALID" else []
        result |= self.figures(reports)
        if self._config.scenario == "Server":
            result |= self._of_server()
        self.check_test(reports)
        if judged == "VALID" and failed_checks(result):
            result["status"] = "INVALID"
        self.keep_reports(reports)
        return f"{self._totals.samples} of {self._totals.issued} samples answered"

    def _of_server(self) -> dict[str, Any]:
        """Return the result.json figures that show whether the system kept up and met the latency limits."""
        if not self._totals.samples:
            return {}
        settings, limits = self._record.result["loadgen"], self._config.goodput
        rows = read_requests(self._record.path)
        figures = arrival_figures(rows)
        figures["latency_limits"] = bool(limits) or any(
            settings[f"{name}_latency_ms"] is not None for name in ("ttft", "tpot")
        )
        if BackendRegistry.get(self._config.core_type).is_client:
            figures["repeated_prompts"] = repeated_prompts(rows)
        return figures | ({"goodput": goodput(rows, limits, self._totals.lasted_s)} if limits else {})

    # --- the end ---

    def rows(self, directory: str, facts: Facts | None) -> list[tuple[str, Any]]:
        return summary_rows(self._record.result, self._config, directory, facts)

    def finished(self) -> int:
        super().finished()
        invalid = self._config.require_valid and self._record.result["status"] != "VALID"
        return int(ExitCode.TEST_FAILED if invalid else ExitCode.DONE)

    def failed(self, reports: dict[int, DrainReport]) -> str:
        """Return LoadGen's verdict, if there is one."""
        self._telemetry.ranks = self._telemetry.ranks or {
            rank: report.telemetry for rank, report in reports.items()
        }
        super().failed(reports)
        if self._timeline.total_metrics() is not None:
            self._record.result.setdefault("per_instance", self._timeline.per_instance())
        judged = self._record.result["loadgen_result"]
        return f"LoadGen's verdict on the test: {judged}; the run failed after it" if judged else ""
