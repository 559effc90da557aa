"""Rank 0's view of a test: the harness, and the progress."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from dataclasses import fields
from typing import Any

from mpillm.comms.loop import EventLoop
from mpillm.comms.messages import DrainReport
from mpillm.comms.rank0_control import Rank0Control
from mpillm.comms.transport import Transport
from mpillm.errors import ExitCode
from mpillm.report.console import Console, LoadProgress, progress_lines
from mpillm.report.outputs import Outputs
from mpillm.report.page.run_analysis import Facts, facts_of
from mpillm.report.request_log import RequestLog
from mpillm.report.result import other_loads, others_on_gpus
from mpillm.report.run_directory import TIMELINE, RunRecord, display_path
from mpillm.report.run_files import RunFiles
from mpillm.roles.harness import Harness, RequestSource, SamplingOptions, Totals
from mpillm.roles.role import Role
from mpillm.runtime.join import RunSamples
from mpillm.runtime.run_session import RunSession

_log = logging.getLogger(__name__)
_PROGRESS_S = 0.1
_LOG_S = 10.0


class LoadSession(RunSession):
    """Session of a test whose requests this rank issues."""

    def __init__(
        self, samples: RunSamples, record: RunRecord, console: Console, control: Rank0Control
    ) -> None:
        """Write the plan to the run directory. Raises OSError if one of its files can't be written."""
        config = samples.planned.config
        self._samples = samples
        self.sends_text = samples.dataset.sends_text
        self._totals = Totals()
        super().__init__(samples.planned, record, console, control, record.path / TIMELINE)
        turns = samples.dataset.turns
        # Only the servers know the tokens of texts, and only the test those of generated histories.
        if not self.sends_text and (turns is None or not turns.are_generated):
            lengths = samples.dataset.n_tokens
            mean, longest = round(float(lengths.mean()), 2), int(lengths.max())
            record.result["prompt_tokens"] = {"mean": mean, "max": longest}
        self._outputs: Outputs | None = None
        if config.save_outputs or samples.shows_text:
            path = record.path / "outputs.jsonl" if config.save_outputs else None
            self._outputs = Outputs(samples.dataset, samples.tokenizer, path)
        self._requests = RequestLog(record.path, None if turns is None else turns.first)
        self._progress_at = self._logged_at = 0.0

    @property
    def totals(self) -> Totals:
        return self._totals

    @abstractmethod
    def source(self, loop: EventLoop) -> RequestSource:
        """Return the source of the test's requests. `loop`: to wake the rank from other threads."""

    @abstractmethod
    def expected(self) -> tuple[int | None, float | None]:
        """Return the number of requests and the seconds of the test, as far as they are known before it."""

    @abstractmethod
    def rows(self, directory: str, facts: Facts | None) -> list[tuple[str, Any]]:
        """Return the rows of the summary. `directory`: the run's, as text; `facts`: of the HTML report."""

    def make_harness(self, route: Transport, leader: int, loop: EventLoop) -> list[Role]:
        options = {one.name: getattr(self._config, one.name) for one in fields(SamplingOptions)}
        source, on_answer = self.source(loop), self._outputs.add if self._outputs else None
        has_handoff = self._plan.instances[0].role == "ctx"
        outputs = (on_answer, has_handoff, self._totals, self._requests)
        harness = Harness(route, leader, self._samples.dataset, SamplingOptions(**options), source, *outputs)
        return [source, harness] if isinstance(source, Role) else [harness]

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
            progress = LoadProgress(totals.samples, totals.issued, totals.tokens, elapsed, *self.expected())
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

    # --- after the test ---

    def close_files(self) -> None:
        """Close the files of responses and requests."""
        if self._outputs:
            self._outputs.close()
        self._requests.close()

    def check_test(self, reports: dict[int, DrainReport]) -> None:
        """Add other load of the nodes, and doubts about the test, to the result."""
        result, nodes = self._record.result, [rank.node for rank in self._plan.ranks]
        result["other_load"] = other_loads(nodes, reports)
        result["other_gpu_processes"] = others_on_gpus(nodes, reports)
        result["doubts"] = self.check_servers(self._config)

    def finished(self) -> int:
        """Print the summary after the last phase; return the exit code."""
        page = self.leave_result()
        if self._outputs and self._samples.shows_text:
            self._console.answers(self._outputs.first_outputs())
        facts, _ = facts_of(RunFiles.read(self._record.path))
        rows = self.rows(display_path(self._record.path), facts)
        self._console.summary([*rows, *self.table(self._samples.dataset), page])
        return int(ExitCode.DONE)
