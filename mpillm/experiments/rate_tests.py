"""Server tests for `rate_search`: runs at a rate, stopped early when they cannot become VALID."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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


class EarlyStop:
    """Checks a run's records periodically. A call returns why the run is hopeless, or ""."""

    def __init__(self, folder: Path, e2el_ms: float | None = None) -> None:
        """`folder`: the run directory. `e2el_ms`: a limit that LoadGen does not check."""
        self._folder = folder
        self._e2el_ms = e2el_ms
        self._next = 0.0
        self._test: dict[str, float] | None = None

    def __call__(self) -> str:
        now = time.monotonic()
        if now < self._next:
            return ""
        self._next = now + _LOOK_S
        if self._test is None:
            self._test = _loadgen(self._folder)
        if self._test is None:
            return ""
        try:
            rows = read_requests(self._folder)
        except ConfigError:  # no answers yet
            return ""
        limits: dict[str, float] = {name: self._test[name] for name in ("ttft", "tpot") if name in self._test}
        if self._e2el_ms is not None:
            limits["e2el"] = self._e2el_ms
        why = hopeless(rows, limits, int(self._test["queries"]), self._test["rate"])
        # uses at most 5 % of a CPU core
        self._next = time.monotonic() + _LOOK_S + 20 * (time.monotonic() - now)
        return why


def _loadgen(folder: Path) -> dict[str, float] | None:
    """Return limits (ms), queries and rate of the run, which it writes before the test; None before that."""
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    loadgen = result.get("loadgen")
    if result.get("phase") != "test" or not loadgen or not loadgen["expected_queries"]:
        return None
    settings = {"queries": float(loadgen["expected_queries"]), "rate": float(loadgen["target_qps"])}
    for name in ("ttft", "tpot"):
        if (limit := loadgen[f"{name}_latency_ms"]) is not None:
            settings[name] = float(limit)
    return settings


def hopeless(rows: NDArray[np.void], limits: Mapping[str, float], queries: int, rate: float) -> str:
    """Return why a test of `queries` at `rate` per second cannot become VALID; "" if it can.

    Two rules: more requests are late than LoadGen's early stopping allows in the whole test (exact, see
    `max_late`); or the queue grows. For the latter, the smallest likely slope of the first-token latency
    (`queue_slope`) must make more than twice the allowed number of requests late by the end.

    Args:
        rows: Records so far, in order of issue.
        limits: Milliseconds by ttft, tpot, e2el.
    """
    allowed = max_late(queries, SERVER_PERCENTILE)
    for name, count in late(rows, limits).items():
        if count > max(allowed, 0):
            return (
                f"{count:,} of {queries:,} {_COUNTED_AS[name]} were later than {limits[name]:g} ms already;"
                f" LoadGen allows {max(allowed, 0):,}"
            )
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
        queries = queries_needed(SERVER_PERCENTILE, late=_PROBE_LATE)
        if full:
            queries = None if self.config.workload or self.config.is_user_set("min_query_count") else queries
        e2el = (self.config.goodput or {}).get("e2el")
        ended = self.run_in(
            folder, self.mpirun, self._options(rate, seconds, queries), EarlyStop(folder, e2el)
        )
        if ended.stopped:
            rows = read_requests(folder)
            span = float((rows["issued"] + rows["latency"]).max())
            return RateTrial(rate, full, False, ended.stopped, len(rows) / span, str(folder))
        must_have_verdict(ended, f"the test at {figure(rate, 4)} per second")
        return self._judged(rate, full, ended)

    def _judged(self, rate: float, full: bool, ended: EndedRun) -> RateTrial:
        result = ended.result
        valid = result["status"] == "VALID"
        refusals = failed_checks(result)
        why = "; ".join([*refusals, *result["loadgen_unsatisfied"], *result["loadgen_advice"]])
        figures = {
            "samples_per_second": result["samples_per_second"],
            "tokens_per_second": result["tokens_per_second"],
            **{
                f"{name}_p99_ms": result[f"{name}_ms"]["p99"]
                for name in ("ttft", "tpot")
                if result[f"{name}_ms"]
            },
        }
        if result["errors"]:
            valid, why = False, f"{result['errors']} answers were errors"
        if (goodput := result.get("goodput")) is not None:
            if late := late_answers(goodput):
                valid, why = False, late
            figures["good_requests_per_second"] = goodput["good_requests_per_second"]
        completed, folder = result["samples_per_second"], str(ended.folder)
        doubts = [doubt for doubt in result["doubts"] if doubt not in refusals]
        return RateTrial(rate, full, valid, "" if valid else why, completed, folder, figures, doubts)
