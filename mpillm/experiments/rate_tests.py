"""Server tests for `rate_search`: whole runs, each at a rate, stopped when they are hopeless."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError
from mpillm.errors import StageError
from mpillm.experiments.rate_search import Tried
from mpillm.experiments.run_series import must_have_verdict
from mpillm.experiments.table import figure
from mpillm.options.run_config import RunConfig
from mpillm.report.arrivals import queue_slope
from mpillm.report.goodput import late
from mpillm.report.request_log import read_requests
from mpillm.report.validity_checks import failed_checks, late_answers
from mpillm.runtime.whole_runs import EndedRun, run_in
from mpillm.workloads.early_stopping import SERVER_PERCENTILE, most_late, queries_needed

_LOOK_S = 0.5
_WHAT = {"ttft": "first tokens", "tpot": "answers by time per token", "e2el": "answers"}


class Watch:
    """Looks at a run's records now and then; `__call__` returns why it is hopeless, or ""."""

    def __init__(self, folder: Path, e2el_ms: float | None = None) -> None:
        """`folder`: the run directory. `e2el_ms`: a limit that LoadGen does not know."""
        self._folder = folder
        self._e2el_ms = e2el_ms
        self._next = 0.0
        self._said: dict[str, float] | None = None

    def __call__(self) -> str:
        now = time.monotonic()
        if now < self._next:
            return ""
        self._next = now + _LOOK_S
        if self._said is None:
            self._said = _loadgen(self._folder)
        if self._said is None:
            return ""
        try:
            rows = read_requests(self._folder)
        except ConfigError:  # nothing answered yet
            return ""
        limits: dict[str, float] = {name: self._said[name] for name in ("ttft", "tpot") if name in self._said}
        if self._e2el_ms is not None:
            limits["e2el"] = self._e2el_ms
        why = hopeless(rows, limits, int(self._said["queries"]), self._said["rate"])
        self._next = time.monotonic() + _LOOK_S + 20 * (time.monotonic() - now)  # at most 5 % of a core
        return why


def _loadgen(folder: Path) -> dict[str, float] | None:
    """Return limits (ms), queries and rate of the run, which it writes before the test; None: not yet."""
    try:
        said = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if said.get("phase") != "test" or not (loadgen := said.get("loadgen")) or not loadgen["expected_queries"]:
        return None
    found = {"queries": float(loadgen["expected_queries"]), "rate": float(loadgen["target_qps"])}
    for name in ("ttft", "tpot"):
        if (limit := loadgen[f"{name}_latency_ms"]) is not None:
            found[name] = float(limit)
    return found


def hopeless(rows: NDArray[np.void], limits: Mapping[str, float], queries: int, rate: float) -> str:
    """Return why a test of `queries` at `rate` per second can't become VALID; "" if it may.

    `rows`: the records so far, in order of issue. `limits` in milliseconds by ttft, tpot, e2el. Two rules:
    more requests are late already than LoadGen's early stopping allows among all (exact: see `most_late`);
    or the queue grows: at the least likely slope of the first-token latency (`queue_slope`), more than twice
    the allowed would be late by the end.
    """
    allowed = most_late(queries, SERVER_PERCENTILE)
    for name, count in late(rows, limits).items():
        if count > max(allowed, 0):
            return (
                f"{count:,} of {queries:,} {_WHAT[name]} were later than {limits[name]:g} ms already;"
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


_WITHOUT_A_WORKLOAD_S = 60.0  # full length, where neither the user nor a workload at full scale names one
_LOADGEN_S = 600.0  # full length of a workload at full scale, from mlperf.conf
_OVERLOAD_QPS = 20_000.0  # of the run that measures the capacity
_LEAST_ANSWERS = 64  # for it
_PROBE_LATE = 1  # a short test is long enough to be VALID with one late query


def _span(rows: NDArray[np.void]) -> float:
    """Return the seconds in which all answers but the first quarter came; 0: there are too few."""
    done = np.sort(rows["issued"] + rows["latency"])
    return float(done[-1] - done[len(done) // 4]) if len(done) >= _LEAST_ANSWERS else 0.0


@dataclass(frozen=True)
class RateTests:
    """The tests of one search."""

    folder: Path
    mpirun: Sequence[str]
    words: Sequence[str]  # of `run`, as typed
    config: RunConfig  # of them
    probe_s: float | None  # length of the short tests

    @property
    def full_s(self) -> float:
        """The length of a full test, seconds."""
        config = self.config
        if config.is_user_set("min_duration") and config.min_duration:
            return float(config.min_duration)
        full_scale = config.workload is not None and not config.workload.scaled
        return _LOADGEN_S if full_scale else _WITHOUT_A_WORKLOAD_S

    @property
    def short_s(self) -> float:
        """The length of a short test, seconds: a tenth of a full one, unless the user named it."""
        return self.probe_s or min(60.0, max(5.0, self.full_s / 10))

    def prepare(self) -> None:
        """Make the folder. Raises ConfigError if there are no limits, or the scenario has no rate."""
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

    def _options(self, rate: float, seconds: float, least: int | None) -> list[str]:
        options = [*self.words, "--server_target_qps", f"{rate:.6g}", "--min_duration", f"{seconds:g}"]
        return options + (["--min_query_count", str(least)] if least else [])

    def _new_folder(self, name: str) -> Path:
        number = len([*self.folder.glob("[0-9][0-9]-*")]) + 1
        return self.folder / f"{number:02d}-{name}"

    def capacity(self) -> float:
        """Return answers per second of a run that gets all queries at once, cut off after a while.

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
            # Some servers answer many at once, and then none for a while: more than one such burst.
            return "measured" if lasted and _span(rows) >= self.short_s / 2 else ""

        queries = int(_OVERLOAD_QPS * self.short_s)
        ended = run_in(folder, self.mpirun, self._options(_OVERLOAD_QPS, 0, queries), enough)
        if not ended.stopped:
            must_have_verdict(ended, "the run that measures the capacity")
        rows = read_requests(folder)
        if not (span := _span(rows)):
            raise StageError(f"the capacity can't be measured: {len(rows)} answers in {folder}")
        return (len(rows) - len(rows) // 4 - 1) / span

    def test(self, rate: float, full: bool) -> Tried:
        """Run a test. Raises ConfigError or StageError if it fails without a verdict."""
        folder = self._new_folder(f"{'full' if full else 'short'}-{rate:.5g}")
        seconds = self.full_s if full else self.short_s
        least = queries_needed(SERVER_PERCENTILE, late=_PROBE_LATE)
        if full:  # as typed
            least = None if self.config.workload or self.config.is_user_set("min_query_count") else least
        e2el = (self.config.goodput or {}).get("e2el")
        ended = run_in(folder, self.mpirun, self._options(rate, seconds, least), Watch(folder, e2el))
        if ended.stopped:
            rows = read_requests(folder)
            span = float((rows["issued"] + rows["latency"]).max())
            return Tried(rate, full, False, ended.stopped, len(rows) / span, str(folder))
        must_have_verdict(ended, f"the test at {figure(rate, 4)} per second")
        return self._judged(rate, full, ended)

    def _judged(self, rate: float, full: bool, ended: EndedRun) -> Tried:
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
        return Tried(rate, full, valid, "" if valid else why, completed, folder, figures, doubts)
