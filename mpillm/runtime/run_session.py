"""What every kind of run has on rank 0, once all ranks have joined."""

from __future__ import annotations

import textwrap
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import disagg
from mpillm.comms.loop import EventLoop
from mpillm.comms.messages import DrainReport
from mpillm.comms.rank0_control import Rank0Control
from mpillm.comms.transport import Transport
from mpillm.cores.base import LLMCore
from mpillm.files import write_json
from mpillm.options.columns import INDENT, indented
from mpillm.options.options import run_name
from mpillm.options.run_config import RunConfig
from mpillm.report.console import Console
from mpillm.report.page.page import leave_page
from mpillm.report.result import add_costs, test_result
from mpillm.report.run_directory import RunRecord, unwritable
from mpillm.report.run_environment import ENVIRONMENT, describe_environment
from mpillm.report.telemetry import RunTelemetry
from mpillm.report.timeline import Timeline
from mpillm.roles.instance import InstanceRole
from mpillm.roles.role import Role
from mpillm.runtime.join import RunPlan
from mpillm.version import __version__

if TYPE_CHECKING:
    from mpillm.cores.openai_client.client_thread import ClientThread
    from mpillm.roles.harness import Totals

S = TypeVar("S")


class RunSession(ABC):
    """The objects of a run on rank 0: what it counts, and what it leaves in the run directory."""

    serves: ClassVar[bool] = False  # until somebody ends it
    sends_text = False  # prompts are texts, of which the servers make tokens

    @classmethod
    @abstractmethod
    def open(
        cls, planned: RunPlan, record: Callable[[], RunRecord], console: Console, control: Rank0Control
    ) -> tuple[RunSession, list[str]]:
        """Make the session, and lines for the console; `record` makes the run directory at the first call."""

    @classmethod
    def directory_name(cls, config: RunConfig) -> str:
        """Return what its directory is called, after the time."""
        return run_name(config)

    @classmethod
    @abstractmethod
    def about(cls, config: RunConfig) -> dict[str, object]:
        """Return what `RunRecord` is told at the start."""

    def __init__(
        self,
        planned: RunPlan,
        record: RunRecord,
        console: Console,
        control: Rank0Control,
        timeline: Path | None,
    ) -> None:
        """Write the plan to the run directory. Raises OSError if it can't be written; see `open`.

        `timeline`: the file for what the instances compute, if one is to be written.
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
        """What was asked and answered."""

    @property
    def http(self) -> ClientThread | None:
        """The thread of the run's endpoint, if it has one."""
        return None

    @property
    def started(self) -> float:
        """When the test began, time.perf_counter(); 0.0: it has not."""
        return self.totals.started

    @abstractmethod
    def make_harness(self, route: Transport, leader: int, loop: EventLoop) -> list[Role]:
        """Return the role that asks, and what stands beside it; `leader`: the leader's rank.

        `loop`: for other threads, when the role has something to do.
        """

    def make_disagg_role(
        self, core: LLMCore, route: Transport, leader: int, instance: int
    ) -> InstanceRole | None:
        """Return the role of the instance's first rank, if this run is a context or a generation server."""
        return None

    @abstractmethod
    def poll(self) -> bool:
        """Do what is due during the test; called often."""

    def note_measured(self) -> None:
        """Add to the timeline what the instances have computed since."""
        for instance in self._plan.instances:
            if (measured := self._control.ranks[instance.root_rank].measured) is not None:
                self._timeline.add(instance.index, *measured)

    def lose(self, instance: int) -> float:
        """Note that an instance is lost, and the run goes on; return the seconds since the test started."""
        self._timeline.lose(instance)
        return time.perf_counter() - self.started if self.started else 0.0

    def drain(self) -> bool:
        """Begin to end the test in an orderly way, if it can; return whether. Called by signal handlers."""
        return False

    def ready(self) -> str:
        """Note that all ranks are ready; return a note for the console."""
        startup = time.time() - self._last_start
        self._record.result["startup_s"] = round(startup, 4)
        return f"{startup:.2f} s after the last rank was started"

    def tested(self) -> None:  # noqa: B027 - nobody judges what was served
        """Note the test's outcome; the ranks report after this."""

    @abstractmethod
    def drained(self, reports: dict[int, DrainReport]) -> str:
        """Note what the ranks report of the test; return a note for the console."""

    def keep_reports(self, reports: Mapping[int, DrainReport]) -> None:
        """Keep the ranks' telemetry; write software and machines, and by name servers and client of a test.

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
        had = {"servers": ", ".join(sorted(names))}
        if other := result.get("harness"):
            had["harness"] = f"{other['name']} {other['version']}".rstrip()
        environment = describe_environment(self._planned.reports[0].versions["MPI"])
        write_json(self._record.path / ENVIRONMENT, environment | had)

    @abstractmethod
    def finished(self) -> int:
        """Print the last lines, as everything has ended well; return the exit code."""

    def leave_result(self) -> tuple[str, str]:
        """Write result and page; return the row of the summary for the page."""
        # Now: an instance may be lost after the test.
        add_costs(self._record.result, self.totals, self._timeline)
        self._record.write_result()
        return self.page()

    def page(self) -> tuple[str, str]:
        """Write the run's page; return its row of the summary. Never raises."""
        return leave_page(
            self._record.path,
            partial(self._telemetry.write, totals=self.totals),
            self._config.price_per_gpu_hour,
        )

    def figures(self, reports: dict[int, DrainReport]) -> dict[str, Any]:
        """Return what was counted, for the result; `reports`: of the ranks, if they have ended."""
        return test_result(self.totals, reports, self._timeline, len(self._plan.ranks))

    def failed(self, reports: dict[int, DrainReport]) -> str:
        """Note in the result what is known; return what else to tell on the console, or "".

        `reports`: what ranks told as a signal ended them.
        """
        self._record.result |= {"samples": self.totals.samples, "errors": self.totals.errors}
        add_costs(self._record.result, self.totals, self._timeline)
        return ""


def opened(make: Callable[[], S], planned: RunPlan, record: Callable[[], RunRecord]) -> S:
    """Return what `make` makes: a session. Raises RunError if the run directory can't be written."""
    try:
        return make()
    except OSError as error:
        raise unwritable(planned.config, record().path, error) from error


def announced(planned: RunPlan, lines: Sequence[str], model: str = "") -> list[str]:
    """Return what the console says before a run loads: what it is, its plan, and more lines."""
    plan, config = planned.plan, planned.config
    nodes = len({rank.node for rank in plan.ranks})
    what = (
        f"ranks: {len(plan.ranks)}, nodes: {nodes}, {plan.mode}, core {config.core_type}{model},"
        f" {planned.reports[0].versions['MPI']}"
    )
    return [
        indented(f"mpillm {__version__}: ", what),
        "",
        disagg.table(plan),
        *(textwrap.indent(line, INDENT) for line in lines),
    ]
