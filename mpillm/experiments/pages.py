"""HTML reports of ab, advise and find-max-qps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from disagg.errors import ConfigError
from mpillm.experiments.option_grid import pareto
from mpillm.experiments.rate_search import RateTrial
from mpillm.experiments.sweep_page import pareto_chart
from mpillm.experiments.table import cell, figure
from mpillm.loadgen.logs import quantile
from mpillm.report.numbers import milliseconds
from mpillm.report.page.charts import Chart
from mpillm.report.page.document import chart_section, document, doubts_list, escape, link_to_run, section
from mpillm.report.request_log import read_requests, tpot_s

_UNITS = {"samples_per_second": "samples/s", "tokens_per_second": "tokens/s"}


def ab_page(
    folder: Path,
    texts: Sequence[str],
    metric: str,
    pairs: Sequence[Mapping[str, Mapping[str, float]]],
    verdict: str,
    doubtful: Sequence[str] = (),
) -> str:
    """Return the HTML. `texts`: the options of A and of B; `verdict`, `doubtful`: lines of the console."""
    unit = _UNITS.get(metric, "ms")
    numbers = [float(i) for i in range(1, len(pairs) + 1)]
    lines: list[tuple[str, list[float | None], int]] = [
        (side, [round(pair[side][metric], 6) for pair in pairs], colour) for colour, side in enumerate("AB")
    ]
    values = Chart("pairs", metric.replace("_", " "), unit, numbers, lines, "pair")
    values.names, values.joined = [f"{i:g}" for i in numbers], len(lines)
    head, *more = verdict.splitlines()
    test = "".join(f"<p>{escape(line)}</p>" for line in more)
    sides = "".join(
        f'<li><i class="c{colour}"></i><strong>{side}</strong> {escape(text or "(no options)")}</li>'
        for colour, (side, text) in enumerate(zip("AB", texts, strict=True))
    )
    rows = []
    for i, pair in enumerate(pairs, 1):
        a, b = pair["A"][metric], pair["B"][metric]
        links = [
            link_to_run(folder / f"{i:02d}-{side}", folder, figure(pair[side][metric], 5)) for side in "AB"
        ]
        rows.append((i, *links, f"{100 * (b / a - 1):+.2f} %"))
    body = (
        f"<header><h1>{escape(folder.absolute().name)}</h1><p><strong>{escape(head)}</strong></p>"
        f'{test}<ul class="runs">{sides}</ul>{doubts_list(doubtful)}</header>',
        chart_section("Pairs", [values], "A and B of each pair ran one after the other."),
        section("All pairs", ("pair", f"A, {unit}", f"B, {unit}", "B against A"), rows),
    )
    return document(f"ab: {folder.absolute().name}", body, [values])


_NOTE = (
    "Each point is a simulated way to use the ranks, with its number in the table. Up and to the right is"
    " better. No other point has more of both than a point on the line."
)


def advise_page(
    folder: Path, predicted: Sequence[tuple[str, Mapping[str, Any]]], of: str, proposals: str, errors: str
) -> str:
    """Return the HTML. `predicted`: each way and its figures; `errors`: of verified predictions, or ""."""
    points = [{"options": {"": label}, **figures} for label, figures in predicted]
    front = pareto(points)
    charts = [chart] if (chart := pareto_chart(points, front, of)) else []
    columns = (
        "#",
        "instances",
        "tokens/s",
        f"tokens/s per {of}",
        "tokens/s per user",
        "TTFT p99 ms",
        "Pareto",
    )
    names = ("tokens_per_second", "tokens_per_second_per_gpu", "tokens_per_second_per_user", "ttft_p99_ms")
    rows = [
        (i + 1, label, *(cell(figures.get(name)) for name in names), "★" if i in front else "")
        for i, (label, figures) in enumerate(predicted)
    ]
    checked = f"<section><h2>Verified</h2><pre>{escape(errors)}</pre></section>" if errors else ""
    body = (
        f"<header><h1>{escape(folder.absolute().name)}</h1><p>{len(predicted)} ways simulated,"
        f" {len(front)} on the Pareto curve</p></header>",
        f"<section><h2>Proposals</h2><pre>{escape(proposals)}</pre></section>",
        chart_section("Predicted", charts, _NOTE, wide=True),
        checked,
        section("All ways", columns, rows),
    )
    return document(f"advise: {folder.absolute().name}", body, charts)


_SEARCH_NOTE = (
    "Each point is a test at its rate, with its number in the table. The line joins VALID tests. Red points"
    " are other tests. If a test was stopped, its figures are from the answers until then."
)
_VALID, _NOT = 2, 5  # colours


def search_page(
    folder: Path,
    tests: Sequence[RateTrial],
    too_high: float | None,
    limits_ms: Mapping[str, float | None],
    unit: str = "requests",
    note: str = "",
) -> str:
    """Return the HTML. `tests`: in their order; `too_high`: None if the search has not ended.

    `unit`: what a rate counts. `note`: on the meaning of VALID.
    """
    charts = [
        chart
        for name, title in (("ttft", "Time to first token"), ("tpot", "Time per output token"))
        if (chart := _curve(tests, name, title, limits_ms.get(name), unit))
    ]
    valid = [one for one in tests if one.valid]
    best = max(valid, key=lambda one: (one.full, one.rate), default=None)
    summary = "No test was VALID."
    if best is not None:
        length = "" if best.full else ", by a short test only"
        summary = f"Highest VALID rate: {figure(best.rate, 5)} {unit} per second{length}."
    if too_high is not None:
        summary += f" Not VALID at {figure(too_high, 5)}."
    known = [f"{name.upper()} {milliseconds(ms)}" for name, ms in limits_ms.items() if ms]
    limits = f"<p>Limits: {escape(', '.join(known))}.</p>" if known else ""
    head = (
        f"<header><h1>{escape(folder.absolute().name)}</h1>"
        f"<p><strong>{escape(summary)}</strong></p>{limits}"
        f"<p>{len(tests)} tests.{escape(note and f' {note}.')}</p></header>"
    )
    columns = (
        "#",
        f"{unit}/s",
        "length",
        "verdict",
        "answers/s" if unit == "requests" else f"{unit} completed/s",
        "TTFT p99 ms",
        "TPOT p99 ms",
        "remarks",
    )
    rows = [
        (
            link_to_run(Path(one.folder), folder, str(i)),
            figure(one.rate, 5),
            "full" if one.full else "short",
            "VALID" if one.valid else "INVALID",
            figure(one.completed, 5),
            *(cell(one.figures.get(f"{name}_p99_ms")) for name in ("ttft", "tpot")),
            "; ".join(filter(None, [one.why, *one.doubts])),
        )
        for i, one in enumerate(tests, 1)
    ]
    body = (
        head,
        chart_section("Latency against rate", charts, _SEARCH_NOTE),
        section("All tests", columns, rows),
    )
    return document(f"find-max-qps: {folder.absolute().name}", body, charts)


def _p99_ms(one: RateTrial, name: str) -> float | None:
    """Return the 99th percentile of a latency; for a stopped test, of its answers until then."""
    if one.figures:
        return one.figures.get(f"{name}_p99_ms")
    try:
        rows = read_requests(Path(one.folder))
    except ConfigError:  # no answers
        return None
    values = rows["ttft"] if name == "ttft" else tpot_s(rows)
    values = values[np.isfinite(values)]
    return 1e3 * quantile(values, 0.99) if len(values) else None


def _curve(tests: Sequence[RateTrial], name: str, title: str, limit: float | None, unit: str) -> Chart | None:
    """Return the 99th percentile of a latency against the rate; None if no test has this latency."""
    known = sorted(
        (one.rate, ms, one.valid, i) for i, one in enumerate(tests, 1) if (ms := _p99_ms(one, name))
    )
    if not known:
        return None
    lines = [("VALID", [round(y, 4) if valid else None for _, y, valid, _ in known], _VALID)]
    if any(not valid for _, _, valid, _ in known):
        lines.append(("not VALID", [None if valid else round(y, 4) for _, y, valid, _ in known], _NOT))
    names = [f"{i} {figure(x, 5)}/s, {'full' if tests[i - 1].full else 'short'}" for x, _, _, i in known]
    chart = Chart(f"rate-{name}", f"{title}, p99", "ms", [x for x, *_ in known], lines, f"{unit}/s offered")
    chart.names = names
    chart.y_limit = ("limit", limit) if limit else None
    return chart
