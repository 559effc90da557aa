"""Rank 0's view of a run once all ranks have joined: the harness, the progress, the result."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from mpillm.comms.loop import EventLoop
from mpillm.comms.messages import DrainReport
from mpillm.comms.rank0_control import Rank0Control
from mpillm.comms.transport import Transport
from mpillm.cores.registry import BackendRegistry
from mpillm.errors import ExitCode, Failure, RunError
from mpillm.loadgen.audit import prepare_audit
from mpillm.loadgen.logs import advice, unsatisfied, verdict
from mpillm.loadgen.sut import LoadGenTest
from mpillm.options.run_config import RunConfig
from mpillm.report.arrivals import arrival_figures
from mpillm.report.console import Console, LoadProgress, progress_lines
from mpillm.report.goodput import goodput
from mpillm.report.outputs import Outputs
from mpillm.report.page.run_analysis import facts_of
from mpillm.report.repeats import repeated_prompts
from mpillm.report.request_log import RequestLog, read_requests
from mpillm.report.result import other_loads, others_on_gpus, summary_rows
from mpillm.report.run_directory import TIMELINE, RunRecord, display_path
from mpillm.report.run_files import RunFiles
from mpillm.report.validity_checks import failed_checks
from mpillm.roles.harness import Harness, SamplingOptions, Totals
from mpillm.roles.role import Role
from mpillm.runtime.join import RunPlan, RunSetup, prepare
from mpillm.runtime.run_session import RunSession, announced, opened

_log = logging.getLogger(__name__)
_PROGRESS_S = 0.1
_LOG_S = 10.0


class Session(RunSession):
    """Session of a test that LoadGen drives."""

    @classmethod
    def open(
        cls, planned: RunPlan, record: Callable[[], RunRecord], console: Console, control: Rank0Control
    ) -> tuple[Session, list[str]]:
        prepared = prepare(planned, lambda: record().path)
        session = opened(lambda: Session(prepared, record(), console, control), planned, record)
        model = planned.config.model_path
        name = f", model {Path(model).name}" if model else ""
        return session, announced(planned, record().path, prepared.announcement(), name)

    @classmethod
    def about(cls, config: RunConfig) -> dict[str, object]:
        return {"loadgen_result": None, "scenario": config.scenario, "test_mode": config.test_mode}

    def __init__(
        self, prepared: RunSetup, record: RunRecord, console: Console, control: Rank0Control
    ) -> None:
        """Write the plan to the run directory. Raises OSError if one of its files can't be written."""
        config = prepared.planned.config
        self._prepared = prepared
        self.sends_text = prepared.dataset.sends_text
        self._totals = Totals()
        scaled = config.workload.n_samples if config.workload and config.workload.scaled else None
        # Path of LoadGen's audit.config, or "".
        self._audit = prepare_audit(config.compliance_test, config.audit_conf, record.path, scaled)
        super().__init__(prepared.planned, record, console, control, record.path / TIMELINE)
        (record.path / "user.conf").write_text(prepared.settings.user_conf, encoding="utf-8")
        record.result["loadgen"] = prepared.settings.to_json()
        if not self.sends_text:  # only the servers know the tokens of texts
            lengths = prepared.dataset.n_tokens
            mean, longest = round(float(lengths.mean()), 2), int(lengths.max())
            record.result["prompt_tokens"] = {"mean": mean, "max": longest}
        self._outputs: Outputs | None = None
        if config.save_outputs or prepared.shows_text:
            path = record.path / "outputs.jsonl" if config.save_outputs else None
            self._outputs = Outputs(prepared.dataset, prepared.tokenizer, path)
        self._requests = RequestLog(record.path)
        self._progress_at = self._logged_at = 0.0

    @property
    def totals(self) -> Totals:
        return self._totals

    def make_harness(self, route: Transport, leader: int, loop: EventLoop) -> list[Role]:
        dataset, settings = self._prepared.dataset, self._prepared.settings
        options = {one.name: getattr(self._config, one.name) for one in fields(SamplingOptions)}
        test = LoadGenTest(settings.test, len(dataset), self._record.path, self._audit, loop)
        on_answer = self._outputs.add if self._outputs else None
        has_handoff = self._plan.instances[0].role == "ctx"
        outputs = (on_answer, has_handoff, self._totals, self._requests)
        return [Harness(route, leader, dataset, SamplingOptions(**options), test, *outputs)]

    def poll(self) -> bool:
        """In the test, record the instances' metrics, and draw the progress.

        This also happens while no request is open: a test of few short requests mostly has none open.
        """
        now, totals = time.monotonic(), self._totals
        if not totals.started or now - self._progress_at <= _PROGRESS_S:
            return False
        self._progress_at = now
        self._requests.flush()
        self.note_measured()
        if self._control.phase == "test":
            self._telemetry.look(totals)
            computed, elapsed = self._timeline.total_metrics(), time.perf_counter() - totals.started
            steady = bool(self._config.show_steady_state_progress)
            forecast = self._prepared.settings.forecast
            progress = LoadProgress(
                totals.samples, totals.issued, totals.tokens, elapsed, forecast.queries, forecast.seconds
            )
            self._console.progress(progress, computed, steady)
            if totals.issued and now - self._logged_at > _LOG_S:
                self._logged_at = now
                _log.info("%s", " ".join(line.strip() for line in progress_lines(progress, computed)))
                self._record.keep(
                    {
                        "samples": totals.samples,
                        "errors": totals.errors,
                        "tokens": totals.tokens,
                        "test_s": round(elapsed, 4),
                        "per_instance": self._timeline.per_instance(),
                    }
                )
        return False

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
        if self._outputs:
            self._outputs.close()
        self._requests.close()
        directory, result = self._record.path, self._record.result
        judged = result["loadgen_result"]
        result |= {"status": judged, "loadgen_unsatisfied": unsatisfied(directory)}
        result["loadgen_advice"] = advice(directory) if judged == "INVALID" else []
        result |= self.figures(reports)
        if self._config.scenario == "Server":
            result |= self._of_server()
        nodes = [rank.node for rank in self._plan.ranks]
        result["other_load"] = other_loads(nodes, reports)
        result["other_gpu_processes"] = others_on_gpus(nodes, reports)
        result["doubts"] = self.check_servers(self._config)
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

    def finished(self) -> int:
        """Print the summary after the last phase; return the exit code."""
        record, config = self._record, self._config
        page = self.leave_result()
        if self._outputs and self._prepared.shows_text:
            self._console.answers(self._outputs.first_outputs())
        facts, _ = facts_of(RunFiles.read(record.path))
        rows = summary_rows(record.result, config, display_path(record.path), facts)
        self._console.summary([*rows, page])
        invalid = config.require_valid and record.result["status"] != "VALID"
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
