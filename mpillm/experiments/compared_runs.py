"""Compare runs: options that differ, and each figure with a confidence interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError
from mpillm.experiments.intervals import Estimate, by_blocks, difference, per_second
from mpillm.experiments.table import run_names
from mpillm.files import read_object
from mpillm.loadgen.logs import quantile
from mpillm.report.request_log import read_requests, tpot_s
from mpillm.report.run_directory import HAS_FIGURES, failures_in
from mpillm.report.run_environment import ENVIRONMENT, differences
from mpillm.report.run_files import RunFiles

Rows = NDArray[np.void]

# Options without influence on the figures.
_NOT_COMPARED = frozenset({"log_dir"})
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Figure:
    """A figure of a run's records."""

    name: str
    unit: str
    of: Callable[[Rows], Any]  # the figure of some records; for a rate, each record's amount
    rate: str = ""  # for a rate: its name in result.json
    issued_over_time: bool = True  # meaningless if all requests are issued at the start (Offline)
    turns: str = ""  # of conversations: "first" or "later"; "all" for a figure that only they have


def _ms(of: Callable[[Rows], NDArray[Any]], q: float | None, rows: Rows) -> float:
    """Return the quantile `q` of a latency, or its mean; NaN if no record has it."""
    values = of(rows)
    values = values[np.isfinite(values)]
    if not len(values):
        return math.nan
    return 1e3 * (float(values.mean(dtype=np.float64)) if q is None else quantile(values, q))


def _interactivity(rows: Rows) -> float:
    """Return output tokens per second of latency, over all records; NaN without a latency."""
    seconds = float(rows["latency"].sum(dtype=np.float64))
    return float(rows["tokens"].sum()) / seconds if seconds else math.nan


LATENCIES: dict[str, Callable[[Rows], NDArray[Any]]] = {
    "TTFT": lambda rows: rows["ttft"],
    "TPOT": tpot_s,
    "latency": lambda rows: rows["latency"],
}
"""Seconds of each request; NaN if it has none."""

FIGURES = (
    Figure("samples/s", "", lambda rows: np.ones(len(rows)), rate="samples_per_second"),
    Figure("tokens/s", "", lambda rows: rows["tokens"].astype(np.float64), rate="tokens_per_second"),
    *(
        Figure(f"{name} {kind}", "ms", partial(_ms, of, q), issued_over_time=name != "TPOT")
        for name, of in LATENCIES.items()
        for kind, q in (("mean", None), ("p50", 0.5), ("p99", 0.99))
    ),
    *(
        Figure(f"TTFT {kind}, {turns} turns", "ms", partial(_ms, LATENCIES["TTFT"], q), turns=turns)
        for turns in ("first", "later")
        for kind, q in (("mean", None), ("p90", 0.9))
    ),
    Figure("interactivity, tokens/s", "", _interactivity, turns="all"),
)


@dataclass(frozen=True)
class ComparedRun:
    """A run to compare."""

    files: RunFiles
    rows: Rows  # in order of issue

    @staticmethod
    def read(path: Path) -> ComparedRun:
        """Read a run. Raises ConfigError if it has no verdict, options or request records."""
        files = RunFiles.read(path)
        status = files.result.get("status")
        if status not in HAS_FIGURES:
            causes = "; ".join(str(one.get("cause")) for one in failures_in(files.result))
            ended = f"it ended as {status}, without a test's figures" if status else ""
            why = causes or ended or "; ".join(files.missing) or "it has no verdict"
            raise ConfigError(f"{path}: this run can't be compared: {why}")
        if not files.config:
            why = "; ".join(one for one in files.missing if "config.json" in one)
            why = why or "its config.json is empty"
            raise ConfigError(f"{path}: this run can't be compared: {why}")
        rows = read_requests(path)
        if len(rows) != files.result.get("samples"):
            raise ConfigError(
                f"{path}: requests.bin has {len(rows)} records, result.json counts"
                f" {files.result.get('samples')}: it is half written, or of another run"
            )
        if not files.result.get("streamed", True):  # times of first tokens are unknown
            rows = rows.copy()
            rows["ttft"] = math.nan
        return ComparedRun(files, rows)

    @property
    def scenario(self) -> str:
        return str(self.files.result.get("scenario"))

    @property
    def _counts(self) -> NDArray[np.bool_]:
        """By record: whether it counts in the figures, as in result.json."""
        counts: NDArray[np.bool_] = (self.rows["error"] == 0) | (not self.files.leaves_out_failed)
        return counts

    @property
    def counted(self) -> Rows:
        """The records that count in latencies."""
        rows: Rows = self.rows[self._counts]
        return rows

    def _of_turns(self, turns: str) -> Rows:
        """Return the counted records; of "first", "later" or "all" turns, those in the window of turns."""
        rows = self.counted
        if not turns:
            return rows
        start, end = self.files.result["conversations"].get("window_s") or (0.0, None)
        rows = rows[(rows["issued"] >= start) & (rows["issued"] <= (math.inf if end is None else end))]
        return rows if turns == "all" else rows[(rows["turn"] == 0) == (turns == "first")]

    def estimate(self, figure: Figure) -> Estimate | None:
        """Return a figure; None if it is meaningless for this run."""
        if self.files.all_at_once and figure.issued_over_time and not figure.rate:
            return None
        if figure.turns and not self.files.has_conversations:
            return None
        if figure.rate:
            issued, ended = self.rows["issued"], self.rows["issued"] + self.rows["latency"]
            starts = np.where(np.isnan(self.rows["ttft"]), ended, issued + self.rows["ttft"])
            # Exclude a load client's start, which is the time before its first request.
            since = float(issued.min(initial=math.inf)) if "harness" in self.files.result else 0.0
            estimate = per_second(starts, ended, figure.of(self.rows) * self._counts, since)
            if isinstance(reported := self.files.result.get(figure.rate), (int, float)):
                estimate = replace(estimate, value=reported)
        else:
            estimate = by_blocks(self._of_turns(figure.turns), figure.of)
        return None if math.isnan(estimate.value) else estimate


def differing_options(runs: Sequence[ComparedRun]) -> list[tuple[str, list[Any]]]:
    """Return the options that differ between runs, with each run's value.

    Options that contain others, such as --core_options, are listed separately: ``core_options.ttft_ms``.
    """
    flat = [dict(_flat(run.files)) for run in runs]
    names = sorted({name for options in flat for name in options})
    rows = [(name, [options.get(name) for options in flat]) for name in names]
    return [(name, values) for name, values in rows if any(value != values[0] for value in values[1:])]


def environment_lines(first: ComparedRun, one: ComparedRun, where: tuple[str, str]) -> list[str]:
    """Return a line for each difference in software and machine of two runs, in the form of `rerun`.

    Raises ConfigError if a run's environment.json is damaged.
    """
    files = [run.files.path / ENVIRONMENT for run in (first, one)]
    if one is first or not all(file.exists() for file in files):
        return []
    return differences(read_object(files[0]), read_object(files[1]), where)


def _flat(files: RunFiles) -> Iterator[tuple[str, Any]]:
    for name in files.config.keys() - _NOT_COMPARED:
        value = files.value(name)
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", one) for key, one in value.items())
        else:
            yield name, value


def compare(runs: Sequence[ComparedRun]) -> dict[str, Any]:
    """Return the comparison as a JSON object: options that differ, and the figures of each run.

    A figure has its `value` and the `half_width` of its 95 % interval. Against the first run it has `change`
    and `change_half_width` (fractions) and `differs`: the interval of the change excludes 0. Unknown values
    are None. `as_offered`: a rate of Server tests whose systems kept up, so it only shows the offered load.
    """
    figures = []
    for figure in FIGURES:
        estimates = [run.estimate(figure) for run in runs]
        if any(estimates):
            cells = [_cell(estimate, estimates[0]) for estimate in estimates]
            if figure.rate and all(run.files.result.get("queue_grew") is False for run in runs):
                cells = [cell and {**cell, "as_offered": True} for cell in cells]
            figures.append({"figure": figure.name, "unit": figure.unit, "runs": cells})
    return {
        "runs": [
            {
                "directory": str(run.files.path),
                "status": run.files.result["status"],
                "scenario": run.scenario,
                "samples": len(run.rows),
                "errors": int(run.rows["error"].sum()),
                "doubts": run.files.doubts,
                "environment": environment_lines(runs[0], run, ("in A", f"in {name}")),
            }
            for name, run in zip(run_names(len(runs)), runs, strict=True)
        ],
        "options": [{"option": name, "values": values} for name, values in differing_options(runs)],
        "figures": figures,
    }


def _cell(one: Estimate | None, first: Estimate | None) -> dict[str, Any] | None:
    if one is None:
        return None
    cell = {"value": one.value, "half_width": _known(one.half_width(_CONFIDENCE))}
    if first is None or one is first or not first.value:
        return cell
    change = difference(first, one)
    reach = change.half_width(_CONFIDENCE)
    return cell | {
        "change": change.value / first.value,
        "change_half_width": _known(reach / first.value),
        "differs": None if math.isnan(reach) else bool(abs(change.value) > reach),
    }


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
