"""Charts of HTML reports as data: series over time, and distributions. `svg` and page.js draw them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpillm.report.numbers import milliseconds
from mpillm.report.page.run_analysis import Facts, bypasses_ranks, floats, limits_ms

_MAX_POINTS = 600
_MAX_SERIES = 16  # of the most loaded instances; more lines would be indistinguishable
_MB = 1 << 20
_SHARES = 200  # points of a distribution
MARKED = (50, 90, 99)
"""The percentiles that a distribution names."""


@dataclass
class Chart:
    """Lines over a common x, or points."""

    name: str  # id of its HTML element
    title: str
    unit: str
    x: list[float]
    lines: list[tuple[str, list[float | None], int]] = field(default_factory=list)  # label, y, colour
    x_label: str = "s"  # ms: a log scale
    limit: tuple[str, float] | None = None  # label and x of a line
    # A text for each x. With `names`, all lines are drawn as points; only the first `joined` are lines also.
    names: list[str] | None = None
    y_limit: tuple[str, float] | None = None  # label and y of a line
    marks: list[tuple[str, float]] = field(default_factory=list)  # labels and x of other lines
    joined: int = 1  # see `names`
    crossed: tuple[str, list[int]] | None = None  # why points have a cross, and their indices in x

    @property
    def is_cdf(self) -> bool:
        return self.x_label == "ms"

    @property
    def x_axis(self) -> str:
        """The caption below the axis."""
        return {"s": "seconds of the test", "ms": "at most, log scale"}.get(self.x_label, self.x_label)

    def to_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "x_axis": self.x_axis,
            "lines": [{"label": label, "y": y, "colour": colour} for label, y, colour in self.lines],
            "crossed": self.crossed[1] if self.crossed else [],
        }


def over_time(facts: Facts) -> list[Chart]:
    """Return charts of the progress of the test and of its instances, by second."""
    charts = [chart for chart in (_answered(facts),) if chart is not None]
    if not facts.run.timeline:
        return charts
    step = max(1.0, facts.test_s / _MAX_POINTS)
    grid = np.arange(0, facts.test_s + step, step)
    rows: dict[int, list[dict[str, Any]]] = {}
    for row in facts.run.timeline:
        rows.setdefault(row["instance"], []).append(row)
    known = sorted(
        rows, key=lambda number: -((facts.instances[number].load or 0) if number in facts.instances else 0)
    )
    numbers = sorted(known[:_MAX_SERIES])
    more = f" ({len(numbers)} of {len(rows)} instances)" if len(rows) > len(numbers) else ""

    def label(number: int) -> str:
        return facts.instances[number].name if number in facts.instances else f"instance {number}"

    for name, title, unit, key, is_count in (
        ("generated", "Tokens generated", "tokens/s", "generated_tokens", True),
        ("prompt", "Prompt tokens computed", "tokens/s", "prompt_tokens", True),
        ("running", "Running requests", "", "running", False),
        ("waiting", "Waiting requests", "", "waiting", False),
        ("kv", "KV cache in use", "%", "kv_cache_usage", False),
    ):
        chart = Chart(name, title + more, unit, np.round(grid, 2).tolist())
        for number in numbers:
            seconds = floats([row["seconds"] for row in rows[number]])
            values = floats([row.get(key) for row in rows[number]])
            if np.isnan(values).all():
                continue
            y = _rate(grid, seconds, values) if is_count else _last_value(grid, seconds, values)
            chart.lines.append((label(number), _listed(100 * y if unit == "%" else y), number))
        if name == "waiting" and (queued := _queued(facts, rows, grid)) is not None:
            chart.lines.append(("for an instance", queued, 7))
        if chart.lines and any(value for _, y, _ in chart.lines for value in y):
            charts.append(chart)
    return charts


def _queued(
    facts: Facts, rows: dict[int, list[dict[str, Any]]], grid: NDArray[np.float64]
) -> list[float | None] | None:
    """Return how many requests wait for an instance: issued, not answered, and in no instance's figures."""
    progress = facts.run.telemetry.get("progress") or {}
    if not any(progress.get("issued") or ()):
        return None
    seconds = floats(progress["seconds"])
    queued = _last_value(grid, seconds, floats(progress["issued"]) - floats(progress["samples"]))
    for of_instance in rows.values():
        at = floats([row["seconds"] for row in of_instance])
        for name in ("running", "waiting"):
            queued -= np.nan_to_num(_last_value(grid, at, floats([row.get(name) for row in of_instance])))
    return _listed(np.maximum(0.0, queued))


def _answered(facts: Facts) -> Chart | None:
    progress = facts.run.telemetry.get("progress") or {}
    if len(progress.get("seconds") or ()) < 2 or bypasses_ranks(facts.run.result):
        return None
    seconds = floats(progress["seconds"])
    step = max(1.0, facts.test_s / _MAX_POINTS)
    grid = np.arange(0, facts.test_s + step, step)
    chart = Chart("answered", "Answered", "samples/s", np.round(grid, 2).tolist())
    for name, key, colour in (("issued", "issued", 7), ("answered", "samples", 6)):
        counts = floats(progress[key])
        chart.lines.append((name, _listed(_rate(grid, seconds, counts)), colour))
    # A server does not count issued samples.
    if facts.run.all_at_once or not any(progress["issued"]):
        del chart.lines[0]
    return chart


def distributions(facts: Facts) -> list[Chart]:
    """Return the latencies' cumulative distributions, with LoadGen's limits."""
    limits, cdfs = limits_ms(facts.run), facts.cdf()
    charts = []
    for key, title in (
        ("ttft", "Time to first token"),
        ("tpot", "Time per output token"),
        ("latency", "End to end"),
    ):
        cdf = cdfs.get(key) or {}
        if max(cdf.get("ms") or [0]) > 0:  # 0 if all tokens come simultaneously: nothing to draw
            shares = [100 * share for share in cdf["share"]]
            limit = limits.get(key)
            x = cdf["ms"]
            chart = Chart(f"cdf-{key}", title, "% of samples", x, [("at most", shares, 0)], "ms")
            chart.limit = ("limit", limit) if limit else None
            percentiles = facts.run.result.get(f"{key}_ms") or {}  # as in the tables
            between = np.interp(MARKED, shares, x).tolist()
            marked = [percentiles.get(f"p{p}", at) for p, at in zip(MARKED, between, strict=True)]
            chart.marks = [
                (f"p{p} {milliseconds(at)}", round(at, 4))
                for p, at in zip(MARKED, marked, strict=True)
                if at is not None  # null: too few requests for this percentile
            ]
            charts.append(chart)
    return charts


def distribution(name: str, title: str, ms: Sequence[float]) -> Chart:
    """Return the cumulative distribution of latencies, none of them 0, with its percentiles marked."""
    shares = np.linspace(0, 100, _SHARES + 1)[1:]
    x, first = np.unique(np.percentile(ms, shares).round(4), return_index=True)
    last = np.append(first[1:] - 1, len(shares) - 1)
    chart = Chart(name, title, "% of requests", x.tolist(), [("at most", shares[last].tolist(), 0)], "ms")
    chart.marks = [
        (f"p{p} {milliseconds(at)}", round(at, 4))
        for p, at in zip(MARKED, np.percentile(ms, MARKED).tolist(), strict=True)
    ]
    return chart


def machines(facts: Facts) -> list[Chart]:
    """Return CPU and memory of each rank, and its GPU's state."""
    charts = [
        _of_ranks(facts, "cpu", "CPU of each rank", "cores", "cpu_s", None, _slope),
        _of_ranks(facts, "rss", "Memory of each rank", "MiB", "rss_bytes", None, lambda _, y: y / _MB),
        _of_ranks(facts, "gpu-power", "GPU power", "W", "power_w", "gpu"),
        _of_ranks(facts, "gpu-load", "GPU load", "%", "load", "gpu", lambda _, y: 100 * y),
        _of_ranks(facts, "gpu-clock", "GPU clock (SM)", "MHz", "sm_mhz", "gpu"),
        _of_ranks(facts, "gpu-temperature", "GPU temperature", "°C", "temperature_c", "gpu"),
        _of_ranks(facts, "gpu-memory", "GPU memory", "MiB", "memory_bytes", "gpu", lambda _, y: y / _MB),
    ]
    return [chart for chart in charts if chart is not None]


def _of_ranks(
    facts: Facts,
    name: str,
    title: str,
    unit: str,
    column: str,
    part: str | None,
    change: Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]] = lambda _, y: y,
) -> Chart | None:
    columns = list(_columns(facts, column, part))
    if not columns:
        return None
    first = min(seconds[0] for _, seconds, _ in columns)
    last = max(seconds[-1] for _, seconds, _ in columns)
    step = max(0.5, (last - first) / _MAX_POINTS)
    grid = np.arange(first, last + step, step)
    more = f" ({_MAX_SERIES} of {len(columns)} ranks)" if len(columns) > _MAX_SERIES else ""
    chart = Chart(name, title + more, unit, np.round(grid, 2).tolist())
    instance_of = {rank: one for one in facts.instances.values() for rank in one.ranks}
    for rank, seconds, values in columns[:_MAX_SERIES]:
        one = instance_of.get(rank)
        label, colour = (f"{rank} {one.name}", one.number) if one else (f"rank {rank}", 7 - rank % 2)
        chart.lines.append((label, _listed(_last_value(grid, seconds, change(seconds, values))), colour))
    return chart


def _columns(
    facts: Facts, column: str, part: str | None
) -> Iterator[tuple[int, NDArray[np.float64], NDArray[np.float64]]]:
    for rank, noted in sorted(facts.noted.items()):
        samples = noted.get("samples") or {}
        samples = (samples.get(part) or {}) if part else samples
        if len(samples.get("seconds") or ()) > 1 and column in samples:
            values = floats(samples[column])
            if not np.isnan(values).all():
                yield rank, floats(samples["seconds"]), values


def _slope(seconds: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.diff(values, prepend=values[0]) / np.maximum(np.diff(seconds, prepend=seconds[0] - 1), 1e-9)


def _rate(
    grid: NDArray[np.float64], seconds: NDArray[np.float64], counts: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return how fast a count grew before each moment of the grid; NaN at the first moment."""
    at = np.interp(grid, np.concatenate([[0.0], seconds]), np.concatenate([[0.0], counts]))
    rate = np.diff(at, prepend=np.nan) / np.diff(grid, prepend=np.nan)
    positive: NDArray[np.float64] = np.maximum(rate, 0)
    return positive


def _last_value(
    grid: NDArray[np.float64], seconds: NDArray[np.float64], values: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the last value before each moment of the grid; NaN before the first."""
    at = np.searchsorted(seconds, grid + 1e-6, side="right") - 1
    return np.where(at >= 0, values[np.maximum(at, 0)], np.nan)


def _listed(values: NDArray[np.float64]) -> list[float | None]:
    return [None if value != value else round(value, 3) for value in values.tolist()]


_MAX_ROWS = 64
_MAX_SPANS = 24_000  # of all rows together: a megabyte of the HTML report
_PHASE_S = 0.005  # shorter phases can't be seen


def lane_rows(facts: Facts) -> list[dict[str, Any]]:
    """Return a row for each rank: label, spans of its steps and handoffs, its phases."""
    instance_of = {rank: one for one in facts.instances.values() for rank in one.ranks}
    rows = []
    ranks = sorted(facts.noted)[:_MAX_ROWS]
    for rank in ranks:
        noted, one = facts.noted[rank], instance_of.get(rank)
        name = one.name if one else _control(facts, rank)
        max_spans = max(100, _MAX_SPANS // len(ranks) // 2)
        rows.append(
            {
                "label": f"{rank} {name}".strip(),
                **{lane: _thinned(noted.get(lane) or {}, max_spans) for lane in ("steps", "handoffs")},
                "phases": [phase for phase in noted.get("phases") or [] if phase[2] - phase[1] >= _PHASE_S],
            }
        )
    return rows


def _control(facts: Facts, rank: int) -> str:
    plan = {one.get("rank"): one for one in facts.run.plan_ranks}
    return " + ".join(plan.get(rank, {}).get("roles") or [])


def _thinned(lane: dict[str, list[Any]], max_spans: int) -> dict[str, list[Any]]:
    """Return at most `max_spans` spans: neighbors are merged if a lane has more."""
    names = ("start", "end", "busy_s", "n", "kind")
    columns = [lane.get(name) or [] for name in names]
    n = min(map(len, columns))
    step = -(-n // max_spans) if n else 1
    if step > 1:
        starts, ends, busy, counts, kinds = columns
        blocks = [slice(i, min(i + step, n)) for i in range(0, n, step)]
        columns = [
            [starts[block.start] for block in blocks],
            [max(ends[block]) for block in blocks],
            [round(sum(busy[block]), 5) for block in blocks],
            [sum(counts[block]) for block in blocks],
            [max(kinds[block], key=kinds[block].count) for block in blocks],
        ]
    return dict(zip(names, columns, strict=True))
