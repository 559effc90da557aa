"""Session: rank 0's part of every kind of run, after all ranks have joined."""

from __future__ import annotations

import textwrap
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import disagg
from disagg.errors import ConfigError
from mpillm.comms.loop import EventLoop
from mpillm.comms.messages import DrainReport
from mpillm.comms.rank0_control import Rank0Control
from mpillm.comms.transport import Transport
from mpillm.cores.base import LLMCore
from mpillm.cores.registry import BackendRegistry
from mpillm.files import write_json
from mpillm.options.columns import INDENT, indented
from mpillm.options.options import run_name
from mpillm.options.run_config import RunConfig
from mpillm.report.console import Console
from mpillm.report.page.page import leave_page
from mpillm.report.request_log import read_requests
from mpillm.report.requests_file import columns_of, write_requests_file
from mpillm.report.result import add_costs, test_result
from mpillm.report.run_directory import RunRecord, display_path, unwritable
from mpillm.report.run_environment import ENVIRONMENT, describe_environment
from mpillm.report.speculation import speculation_figures
from mpillm.report.telemetry import RunTelemetry
from mpillm.report.timeline import Timeline
from mpillm.report.validity_checks import doubts, server_checks
from mpillm.roles.instance import InstanceRole
from mpillm.roles.role import Role
from mpillm.runtime.join import RunPlan
from mpillm.version import __version__
from mpillm.workloads.rounds import allows_speculation

if TYPE_CHECKING:
    from mpillm.cores.openai_client.client_thread import ClientThread
    from mpillm.data.dataset import Dataset
    from mpillm.roles.harness import Totals

S = TypeVar("S")


class RunSession(ABC):
    """Rank 0's objects of a run: its statistics, and the files of the run directory."""

    serves: ClassVar[bool] = False  # True: the run serves until a signal ends it
    sends_text = False  # True: prompts are texts, which the servers tokenize

    @classmethod
    @abstractmethod
    def open(
        cls, planned: RunPlan, record: Callable[[], RunRecord], console: Console, control: Rank0Control
    ) -> tuple[RunSession, list[str]]:
        """Create the session and lines for the console. The first `record()` creates the run directory."""

    @classmethod
    def directory_name(cls, config: RunConfig) -> str:
        """Return the part of the run directory's name that follows the time."""
        return run_name(config)

    @classmethod
    @abstractmethod
    def about(cls, config: RunConfig) -> dict[str, object]:
        """Return the initial values for result.json."""

    def __init__(
        self,
        planned: RunPlan,
        record: RunRecord,
        console: Console,
        control: Rank0Control,
        timeline: Path | None,
    ) -> None:
        """Write the plan to the run directory. Raises OSError if it can't be written; see `open`.

        `timeline`: file for the instances' metrics; None: no file.
        """
        self._planned, self._config, self._plan = planned, planned.config, planned.plan
        self._record, self._console, self._control = record, console, control
        self._last_start = max(report.started for report in planned.reports.values())
        record.write_plan(planned.yaml, planned.plan, planned.reports)
        self._telemetry = RunTelemetry()
        self._timeline = Timeline((instance.index for instance in planned.plan.instances), timeline)

    @property
    @abstractmethod
    def totals(self) -> Totals:
        """Counts of requests and responses."""

    @property
    def http(self) -> ClientThread | None:
        """The thread of the run's endpoint, if it has one."""
        return None

    @property
    def started(self) -> float:
        """Time of the test's start, time.perf_counter(); 0.0 before it."""
        return self.totals.started

    @abstractmethod
    def make_harness(self, route: Transport, leader: int, loop: EventLoop) -> list[Role]:
        """Return the role that sends requests, and other roles. `leader`: the leader's rank.

        `loop`: other threads wake the rank through it.
        """

    def make_disagg_role(
        self, core: LLMCore, route: Transport, leader: int, instance: int
    ) -> InstanceRole | None:
        """Return the role of the instance's root rank, if this run is a context or a generation server."""
        return None

    @abstractmethod
    def poll(self) -> bool:
        """Do the periodic work of the test. Called often."""

    def note_measured(self) -> None:
        """Add the instances' metrics to the timeline."""
        for instance in self._plan.instances:
            if (measured := self._control.ranks[instance.root_rank].measured) is not None:
                self._timeline.add(instance.index, *measured)

    def lose(self, instance: int) -> float:
        """Record a lost instance in a run that continues; return the seconds since the test's start."""
        self._timeline.lose(instance)
        return time.perf_counter() - self.started if self.started else 0.0

    def drain(self) -> bool:
        """Start to drain the test, if possible; return whether it has started. Signal handlers call this."""
        return False

    def ready(self) -> str:
        """Record that all ranks are ready; return a note for the console."""
        startup = time.time() - self._last_start
        self._record.result["startup_s"] = round(startup, 4)
        return f"{startup:.2f} s after the last rank was started"

    def tested(self) -> None:  # noqa: B027 - a run that serves has no verdict
        """Record the test's outcome. The ranks report afterwards."""

    @abstractmethod
    def drained(self, reports: dict[int, DrainReport]) -> str:
        """Process the ranks' reports on the test; return a note for the console."""

    def check_servers(self, config: RunConfig) -> list[str]:
        """Add the checks of the servers' answers to the result; return the doubts about the test."""
        result, workload = self._record.result, config.workload
        rules = {
            "reuse_allowed": config.allows_cached_prompts,
            "speculation_forbidden": workload is not None and not allows_speculation(workload),
        }
        if checks := server_checks(result, **rules):
            result["server_checks"] = checks
        others_serve = BackendRegistry.get(config.core_type).is_client and not config.server
        return doubts(result, others_serve=others_serve, **rules)

    def keep_reports(self, reports: Mapping[int, DrainReport]) -> None:
        """Store the ranks' telemetry; write files on the machines and on the software that took part.

        Raises OSError.
        """
        self._timeline.close()
        self._telemetry.ranks = {rank: report.telemetry for rank, report in reports.items()}
        machines = {
            self._plan.ranks[rank].node: report.machine
            for rank, report in sorted(reports.items())
            if report.machine
        }
        write_json(self._record.path / "machines.json", machines)
        result = self._record.result
        names = {name for one in result["per_instance"] for name in one.get("frameworks", ())}
        programs = {"servers": ", ".join(sorted(names))}
        if other := result.get("harness"):
            programs["harness"] = f"{other['name']} {other['version']}".rstrip()
        environment = describe_environment(self._planned.reports[0].versions["MPI"])
        write_json(self._record.path / ENVIRONMENT, environment | programs)

    @abstractmethod
    def finished(self) -> int:
        """Print the summary of a successful run; return the exit code."""

    def leave_result(self) -> tuple[str, str]:
        """Write the result and the HTML report; return the summary's row for the report."""
        # Costs are added last: an instance may be lost after the test.
        add_costs(self._record.result, self.totals, self._timeline)
        self._record.write_result()
        return self.page()

    def table(self, dataset: Dataset) -> list[tuple[str, str]]:
        """Write --requests_file; return the summary's row for it, or for the error."""
        if not (path := self._config.requests_file):
            return []
        try:
            rows = read_requests(self._record.path)
            turns = dataset.turns
            is_known = not (self.sends_text or (turns is not None and turns.are_generated))
            write_requests_file(path, columns_of(rows, turns, dataset.n_tokens if is_known else None))
        except (ConfigError, OSError) as error:
            return [("requests", f"not written: {error}")]
        return [("requests", path)]

    def page(self) -> tuple[str, str]:
        """Write the HTML report; return the summary's row for it. Never raises."""
        write_telemetry = partial(self._telemetry.write, totals=self.totals)
        return leave_page(self._record.path, write_telemetry, self._config.price_per_gpu_hour)

    def figures(self, reports: dict[int, DrainReport]) -> dict[str, Any]:
        """Return the figures for the result. `reports`: the ranks' reports, if the ranks have ended."""
        figures = test_result(self.totals, reports, self._timeline, len(self._plan.ranks))
        n_requests = self.totals.samples + self.totals.cancelled
        set_length = self._config.acceptance_length
        of_drafts = speculation_figures(figures["per_instance"], n_requests, set_length)
        return figures | ({"speculation": of_drafts} if of_drafts else {})

    def failed(self, reports: dict[int, DrainReport]) -> str:
        """Complete the result of a failed run; return an additional line for the console, or "".

        `reports`: reports of ranks that a signal has ended.
        """
        self._record.result |= {"samples": self.totals.samples, "errors": self.totals.errors}
        add_costs(self._record.result, self.totals, self._timeline)
        return ""


def opened(make: Callable[[], S], planned: RunPlan, record: Callable[[], RunRecord]) -> S:
    """Create a session with `make`. Raises RunError if the run directory cannot be written."""
    try:
        return make()
    except OSError as error:
        raise unwritable(planned.config, record().path, error) from error


def announced(planned: RunPlan, directory: Path, lines: Sequence[str]) -> list[str]:
    """Return the console's text before the load phase: versions, plan, run directory, then `lines`."""
    plan, config = planned.plan, planned.config
    lines = [f"run directory {display_path(directory)}", *planned.notes, *lines]
    nodes = len({rank.node for rank in plan.ranks})
    model = f", model {Path(config.model_path).name}" if config.model_path else ""
    summary = (
        f"ranks: {len(plan.ranks)}, nodes: {nodes}, {plan.mode}, core {config.core_type}{model},"
        f" {planned.reports[0].versions['MPI']}"
    )
    return [
        indented(f"mpillm {__version__}: ", summary),
        "",
        disagg.table(plan),
        *(textwrap.indent(line, INDENT) for line in lines),
    ]
