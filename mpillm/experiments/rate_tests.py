"""Server tests for `rate_search`: runs at a rate, stopped early when they cannot become VALID."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError
from mpillm.errors import StageError
from mpillm.experiments.rate_search import RateTrial
from mpillm.experiments.run_series import must_have_verdict
from mpillm.experiments.table import figure
from mpillm.options.run_config import RunConfig
from mpillm.report.arrivals import queue_slope
from mpillm.report.goodput import late
from mpillm.report.request_log import read_requests
from mpillm.report.validity_checks import failed_checks, late_answers
from mpillm.runtime.whole_runs import EndedRun, run_in
from mpillm.workloads.early_stopping import SERVER_PERCENTILE, max_late, queries_needed

_LOOK_S = 0.5
_COUNTED_AS = {"ttft": "first tokens", "tpot": "answers by time per token", "e2el": "answers"}


WhyHopeless = Callable[[NDArray[np.void], Mapping[str, Any]], str]
"""Returns why a test cannot meet its limits, or "", from its records and its result.json before the test."""


class EarlyStop:
    """Checks a run's records periodically. A call returns why the run is hopeless, or ""."""

    def __init__(self, folder: Path, why_hopeless: WhyHopeless) -> None:
        """`folder`: the run directory. `why_hopeless`: returns why the test cannot meet its limits, or ""."""
        self._folder = folder
        self._why_hopeless = why_hopeless
        self._next = 0.0
        self._result: dict[str, Any] | None = None

    def __call__(self) -> str:
        now = time.monotonic()
        if now < self._next:
            return ""
        self._next = now + _LOOK_S
        if self._result is None:
            self._result = _result_before_test(self._folder)
        if self._result is None:
            return ""
        try:
            rows = read_requests(self._folder)
        except ConfigError:  # no answers yet
            return ""
        why = self._why_hopeless(rows, self._result)
        # uses at most 5 % of a CPU core
        self._next = time.monotonic() + _LOOK_S + 20 * (time.monotonic() - now)
        return why


def _result_before_test(folder: Path) -> dict[str, Any] | None:
    """Return the result that the run writes before its test; None before that."""
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return result if isinstance(result, dict) and result.get("phase") == "test" else None


def too_late(rows: NDArray[np.void], limits: Mapping[str, float], queries: int) -> str:
    """Return that more requests are late than early stopping allows in a test of `queries`; "" if not.

    `rows`: records so far. `limits`: milliseconds by ttft, tpot, e2el.
    """
    allowed = max(0, max_late(queries, SERVER_PERCENTILE))
    for name, count in late(rows, limits).items():
        if count > allowed:
            return (
                f"{count:,} of {queries:,} {_COUNTED_AS[name]} were later than {limits[name]:g} ms already;"
                f" LoadGen allows {allowed:,}"
            )
    return ""


def hopeless(rows: NDArray[np.void], limits: Mapping[str, float], queries: int, rate: float) -> str:
    """Return why a test of `queries` at `rate` per second cannot become VALID; "" if it can.

    Two rules: more requests are late than LoadGen's early stopping allows in the whole test (exact, see
    `max_late`); or the queue grows. For the latter, the smallest likely slope of the first-token latency
    (`queue_slope`) must make more than twice the allowed number of requests late by the end.

    Args:
        rows: Records so far, in order of issue.
        limits: Milliseconds by ttft, tpot, e2el.
    """
    if why := too_late(rows, limits, queries):
        return why
    allowed = max_late(queries, SERVER_PERCENTILE)
    if "ttft" in limits and (slope := queue_slope(rows)) is not None:
        per_s, level, at = slope
        if per_s > 0:
            end = queries / rate
            crossed = at + max(0.0, (limits["ttft"] / 1e3 - level)) / per_s
            if (end - crossed) * rate > 2 * max(allowed, 1):
                return (
                    f"the queue grows: first tokens come {1e3 * per_s:,.0f} ms later each second, so they"
                    f" would be later than {limits['ttft']:g} ms after {crossed:,.0f} of {end:,.0f} s"
                )
    return ""


_WITHOUT_A_WORKLOAD_S = 60.0  # full length without --min_duration and without a full-scale workload
_LOADGEN_S = 600.0  # full length of a workload at full scale, from mlperf.conf
_OVERLOAD_QPS = 20_000.0  # rate of the run that measures the capacity
_MIN_ANSWERS = 64  # of that run
_PROBE_LATE = 1  # a short test has enough queries to be VALID with this many late queries


def _span(rows: NDArray[np.void]) -> float:
    """Return the seconds during which all answers except the first quarter arrive; 0 if there are too few."""
    done = np.sort(rows["issued"] + rows["latency"])
    return float(done[-1] - done[len(done) // 4]) if len(done) >= _MIN_ANSWERS else 0.0


@dataclass(frozen=True)
class RateTests:
    """The tests of one search."""

    folder: Path
    mpirun: Sequence[str]
    args: Sequence[str]  # of `run`, as typed
    config: RunConfig  # of these arguments
    probe_s: float | None  # length of the short tests
    run_in: Callable[..., EndedRun] = run_in  # starts a run
    unit: ClassVar[str] = "requests"  # that a rate counts
    start: ClassVar[float | None] = None  # first rate of a search; None: the capacity
    note: ClassVar[str] = ""  # for the user, before the search
    per_second: ClassVar[str] = "per second"  # the unit in lines

    @property
    def limits_ms(self) -> dict[str, float]:
        """The limits that LoadGen does not have."""
        return dict(self.config.goodput or {})

    @property
    def full_s(self) -> float:
        """Length of a full test, seconds."""
        config = self.config
        if config.is_user_set("min_duration") and config.min_duration:
            return float(config.min_duration)
        full_scale = config.workload is not None and not config.workload.scaled
        return _LOADGEN_S if full_scale else _WITHOUT_A_WORKLOAD_S

    @property
    def short_s(self) -> float:
        """Length of a short test, seconds; by default a tenth of a full test."""
        return self.probe_s or min(60.0, max(5.0, self.full_s / 10))

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of all tests of a search, also when it is continued."""
        return {
            "options": self.args,
            "mpirun": self.mpirun,
            "goodput": self.limits_ms,
            "short_s": self.short_s,
        }

    def prepare(self) -> None:
        """Create the folder. Raises ConfigError if there are no limits, or the scenario has no rate."""
        config = self.config
        if config.scenario != "Server":
            raise ConfigError(
                f"{config.named('scenarios')}: only Server and Interactive have a rate to search for"
            )
        if config.workload is None and not config.goodput and config.user_conf is None:
            raise ConfigError(
                "without a workload there is no latency limit, and every rate is VALID: give"
                " --goodput ttft:500 tpot:50 (milliseconds), or --benchmarks"
            )
        self.folder.mkdir(parents=True, exist_ok=True)

    def _options(self, rate: float, seconds: float, queries: int | None) -> list[str]:
        options = [*self.args, "--server_target_qps", f"{rate:.6g}", "--min_duration", f"{seconds:g}"]
        return options + (["--min_query_count", str(queries)] if queries else [])

    def _new_folder(self, name: str) -> Path:
        number = len([*self.folder.glob("[0-9][0-9]-*")]) + 1
        return self.folder / f"{number:02d}-{name}"

    def capacity(self) -> float:
        """Return answers per second of a run that gets all queries at the start and is stopped early.

        Raises ConfigError or StageError if it fails.
        """
        folder = self._new_folder("capacity")
        began: float | None = None

        def enough() -> str:
            nonlocal began
            try:
                rows = read_requests(folder)
            except ConfigError:
                return ""
            began = began or time.monotonic()
            lasted = time.monotonic() - began > self.short_s
            # Some servers answer in bursts: measure more than one burst.
            return "measured" if lasted and _span(rows) >= self.short_s / 2 else ""

        queries = int(_OVERLOAD_QPS * self.short_s)
        ended = self.run_in(folder, self.mpirun, self._options(_OVERLOAD_QPS, 0, queries), enough)
        if not ended.stopped:
            must_have_verdict(ended, "the run that measures the capacity")
        rows = read_requests(folder)
        if not (span := _span(rows)):
            raise StageError(f"the capacity can't be measured: {len(rows)} answers in {folder}")
        return (len(rows) - len(rows) // 4 - 1) / span

    def test(self, rate: float, full: bool) -> RateTrial:
        """Run a test. Raises ConfigError or StageError if it fails without a verdict."""
        folder = self._new_folder(f"{'full' if full else 'short'}-{rate:.5g}")
        seconds = self.full_s if full else self.short_s
        options = self._options(rate, seconds, self._min_queries(full))
        ended = self.run_in(folder, self.mpirun, options, EarlyStop(folder, self._hopeless))
        if ended.stopped:
            completed = self._completed_per_second(read_requests(folder))
            return RateTrial(rate, full, False, ended.stopped, completed, str(folder))
        must_have_verdict(ended, f"the test at {figure(rate, 4)} per second")
        return self._judged(rate, full, ended)

    def _min_queries(self, full: bool) -> int | None:
        has_own = self.config.workload or self.config.is_user_set("min_query_count")
        return None if full and has_own else queries_needed(SERVER_PERCENTILE, late=_PROBE_LATE)

    def _hopeless(self, rows: NDArray[np.void], result: Mapping[str, Any]) -> str:
        loadgen = result.get("loadgen")
        if not loadgen or not loadgen["expected_queries"]:
            return ""
        limits = {name: loadgen[f"{name}_latency_ms"] for name in ("ttft", "tpot")}
        limits["e2el"] = self.limits_ms.get("e2el")  # LoadGen does not check it
        known = {name: float(limit) for name, limit in limits.items() if limit is not None}
        return hopeless(rows, known, int(loadgen["expected_queries"]), float(loadgen["target_qps"]))

    def _completed_per_second(self, rows: NDArray[np.void]) -> float:
        return len(rows) / float((rows["issued"] + rows["latency"]).max())

    def _judged(self, rate: float, full: bool, ended: EndedRun) -> RateTrial:
        result = ended.result
        valid = result["status"] == "VALID"
        refusals = failed_checks(result)
        why = "; ".join([*refusals, *result["loadgen_unsatisfied"], *result["loadgen_advice"]])
        figures = common_figures(result)
        if result["errors"]:
            valid, why = False, f"{result['errors']} answers were errors"
        if (goodput := result.get("goodput")) is not None:
            if late := late_answers(goodput):
                valid, why = False, late
            figures["good_requests_per_second"] = goodput["good_requests_per_second"]
        completed, folder = result["samples_per_second"], str(ended.folder)
        doubts = [doubt for doubt in result["doubts"] if doubt not in refusals]
        return RateTrial(rate, full, valid, "" if valid else why, completed, folder, figures, doubts)


def common_figures(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a trial that tests of all loads have."""
    latencies = {f"{name}_p99_ms": (result[f"{name}_ms"] or {}).get("p99") for name in ("ttft", "tpot")}
    return {
        "samples_per_second": result["samples_per_second"],
        "tokens_per_second": result["tokens_per_second"],
        **{name: value for name, value in latencies.items() if value is not None},
    }
