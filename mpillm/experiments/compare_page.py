"""HTML report of a comparison: options that differ, figures with their intervals, distributions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpillm.experiments.compared_runs import LATENCIES, ComparedRun
from mpillm.experiments.intervals import STARRED, WITHOUT_INTERVAL
from mpillm.experiments.table import change_text, run_names, value_text
from mpillm.loadgen.logs import quantile
from mpillm.report.numbers import milliseconds, percent
from mpillm.report.page.charts import MARKED, Chart
from mpillm.report.page.document import CDF, Html, chart_section, document, escape, link_to_run, section
from mpillm.report.page.run_analysis import limits_ms

_HEADLINES = ("samples/s", "tokens/s", "TTFT p99", "TPOT p99", "latency p99")
_POINTS = 150  # of each run's distribution
_MIN_MS = 1e-3  # drawn for 0, which a logarithmic scale lacks
_TITLES = {"TTFT": "Time to first token", "TPOT": "Time per output token", "latency": "End to end"}


def compare_page(result: Mapping[str, Any], runs: Sequence[ComparedRun], folder: Path) -> str:
    """Return the HTML. `result`: `compare` of the runs; `folder`: of the HTML file, for its links."""
    names = run_names(len(runs))
    charts = _distributions(runs, names)
    title = " against ".join(run.files.path.absolute().name for run in runs)
    body = (
        _head(result, names, folder),
        _options(result, names),
        _figures(result, names),
        chart_section("Latencies", charts, CDF),
    )
    return document(f"compare: {title}", body, charts)


def _head(result: Mapping[str, Any], names: Sequence[str], folder: Path) -> str:
    rows = "".join(
        f'<li><i class="c{i % 8}"></i><strong>{name}</strong> '
        f"{link_to_run(Path(run['directory']), folder, Path(run['directory']).absolute().name)}:"
        f" {escape(run['status'])}, {run['samples']:,} samples, {run['errors']} errors{_notes(run)}</li>"
        for i, (name, run) in enumerate(zip(names, result["runs"], strict=True))
    )
    return (
        f"<header><h1>Runs compared, {escape(result['runs'][0]['scenario'])}</h1>"
        f'<p><strong>{escape(headline(result, names))}</strong></p><ul class="runs">{rows}</ul></header>'
    )


def _notes(run: Mapping[str, Any]) -> str:
    """Return a run's doubts, and differences of its environment."""
    lines = [*(f"doubtful: {one}" for one in run["doubts"]), *run["environment"]]
    return "".join(f'<br><span class="note">{escape(line)}</span>' for line in lines)


def headline(result: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return a sentence on the differences from the first run, better or worse."""
    clauses = []
    for i, name in enumerate(names[1:], 1):
        cells = {one["figure"]: one["runs"][i] for one in result["figures"]}
        differing = {figure: cell for figure, cell in cells.items() if cell and cell.get("differs")}
        changes = [
            f"{figure} {percent(cell['change'])}\N{NO-BREAK SPACE}% ({_kind(figure, cell) or 'as offered'})"
            for figure, cell in differing.items()
            if figure in _HEADLINES or differing.keys().isdisjoint(_HEADLINES)
        ]
        known = any(_known(cell) for figure, cell in cells.items() if figure in _HEADLINES)
        none = "no difference that single runs can show" if known else "too few requests"
        clauses.append(f"{name} against {names[0]}: {', '.join(changes) or none}")
    return "; ".join(clauses) + "."


def is_better(figure: str, change: float) -> bool:
    """Return whether a change is an improvement: a higher rate, or a lower latency."""
    return (change > 0) == figure.endswith("/s")


def _options(result: Mapping[str, Any], names: Sequence[str]) -> str:
    rows = [
        [one["option"], *("-" if value is None else value for value in one["values"])]
        for one in result["options"]
    ]
    if not rows:
        return "<section><h2>Options that differ</h2><p>None: all are alike.</p></section>"
    return section("Options that differ", ("option", *names), rows)


def _figures(result: Mapping[str, Any], names: Sequence[str]) -> str:
    changes = [cell for one in result["figures"] for cell in one["runs"] if _known(cell)]
    reach = min(1.0, max((abs(cell["change"]) + cell["change_half_width"] for cell in changes), default=0.0))
    rows = []
    for one in result["figures"]:
        row = [f"{one['figure']} {one['unit']}".rstrip(), _unbroken(value_text(one["runs"][0]))]
        for cell in one["runs"][1:]:
            row += [
                _unbroken(value_text(cell)),
                _judged(one["figure"], cell),
                _whisker(one["figure"], cell, reach),
            ]
        rows.append(row)
    columns = ["figure", names[0]]
    for name in names[1:]:
        columns += [name, f"{name} against {names[0]}", _axis(reach)]
    note = (
        '<p class="note">± and the bars: 95 % confidence intervals, from blocks of neighbouring requests of'
        f" each run. * and a colour (green is better, red is worse): {STARRED}."
        f" Without ±: {WITHOUT_INTERVAL}.</p>"
    )
    return section("Figures", columns, rows, note)


def _unbroken(text: str) -> str:
    return text.strip().replace(" ", "\N{NO-BREAK SPACE}")


def _known(cell: Mapping[str, Any] | None) -> bool:
    return cell is not None and cell.get("change_half_width") is not None


def _judged(figure: str, cell: Mapping[str, Any] | None) -> Html:
    """Return a change, in green if it is better, in red if it is worse."""
    return Html(f'<span class="{_kind(figure, cell)}">{escape(_unbroken(change_text(cell)))}</span>')


def _kind(figure: str, cell: Mapping[str, Any] | None) -> str:
    if cell is None or not cell.get("differs") or cell.get("as_offered"):
        return ""
    return "better" if is_better(figure, cell["change"]) else "worse"


def _axis(reach: float) -> Html:
    """Draw the axis of the intervals."""
    if not reach:
        return Html("")
    return Html(
        f'<svg class="change" viewBox="0 0 200 18"><text x="4" y="13">{percent(-reach)} %</text>'
        '<text x="100" y="13" text-anchor="middle">0</text>'
        f'<text x="196" y="13" text-anchor="end">{percent(reach)} %</text></svg>'
    )


def _whisker(figure: str, cell: Mapping[str, Any] | None, reach: float) -> Html:
    """Draw the interval of a change: 0 in the middle, -reach and +reach at the ends."""
    if cell is None or not _known(cell) or not reach:
        return Html("")
    middle, width = cell["change"], cell["change_half_width"]
    low, at, high = (
        100 + 96 * max(-1.0, min(1.0, x / reach)) for x in (middle - width, middle, middle + width)
    )
    return Html(
        f'<svg class="change {_kind(figure, cell)}" viewBox="0 0 200 18" aria-hidden="true">'
        '<line class="zero" x1="4" y1="17.5" x2="196" y2="17.5"/>'
        '<line class="zero" x1="100" y1="0" x2="100" y2="18"/>'
        f'<line x1="{low:.1f}" y1="9" x2="{high:.1f}" y2="9"/>'
        f'<circle cx="{at:.1f}" cy="9" r="3.5"/></svg>'
    )


def _distributions(runs: Sequence[ComparedRun], names: Sequence[str]) -> list[Chart]:
    charts = []
    shares = np.linspace(0, 1, _POINTS)
    for key, of in LATENCIES.items():
        if runs[0].files.all_at_once and key != "TPOT":  # only shows a sample's position in the queue
            continue
        values = [1e3 * of(run.counted) for run in runs]
        values = [np.sort(one[np.isfinite(one)]) for one in values]
        if not all(map(len, values)) or not max(one[-1] for one in values):
            continue  # all tokens arrive together
        x = np.concatenate([np.quantile(one, shares) for one in values]).round(4)
        x = np.unique(np.maximum(x, _MIN_MS))
        chart = Chart(f"cdf-{key.lower()}", _TITLES[key], "% of samples", x.tolist(), x_label="ms")
        for i, (name, one) in enumerate(zip(names, values, strict=True)):
            share = 100 * np.searchsorted(one.round(4), x, side="right") / len(one)
            known = ", ".join(f"p{p} {milliseconds(quantile(one, p / 100))}" for p in MARKED)
            chart.lines.append((f"{name}: {known}", share.round(2).tolist(), i))
        limits = {limits_ms(run.files).get(key.lower()) for run in runs}
        if len(limits) == 1 and (limit := limits.pop()):
            chart.limit = ("limit", limit)
        charts.append(chart)
    return charts
