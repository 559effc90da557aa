"""The page of find-max-qps: latency against rate, and the table of all tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from disagg.errors import ConfigError
from mpillm.experiments.rate_search import Tried
from mpillm.experiments.table import cell
from mpillm.loadgen.logs import quantile
from mpillm.report.numbers import milliseconds
from mpillm.report.page.charts import Chart
from mpillm.report.page.document import chart_section, document, escape, link_to_run, section
from mpillm.report.request_log import read_requests, tpot_s

_NOTE = (
    "Each point is a test at its rate, with its number in the table. The line joins those that were VALID;"
    " red ones were not; of those that were stopped, the answers until then count."
)
_VALID, _NOT = 2, 5  # colours


def search_page(
    folder: Path, tests: Sequence[Tried], too_high: float | None, limits_ms: Mapping[str, float | None]
) -> str:
    """Return the page. `tests`: in their order; `too_high`: None: the search has not ended."""
    charts = [
        chart
        for name, title in (("ttft", "Time to first token"), ("tpot", "Time per output token"))
        if (chart := _curve(tests, name, title, limits_ms.get(name)))
    ]
    valid = [one for one in tests if one.valid]
    best = max(valid, key=lambda one: (one.full, one.rate), default=None)
    said = "No test was VALID."
    if best is not None:
        length = "" if best.full else ", by a short test only"
        said = f"Highest VALID rate: {best.rate:.5g} requests per second{length}."
    if too_high is not None:
        said += f" Not VALID at {too_high:.5g}."
    known = [f"{name.upper()} {milliseconds(ms)}" for name, ms in limits_ms.items() if ms]
    limits = f"<p>Limits: {escape(', '.join(known))}.</p>" if known else ""
    head = (
        f"<header><h1>{escape(folder.absolute().name)}</h1>"
        f"<p><strong>{escape(said)}</strong></p>{limits}<p>{len(tests)} tests.</p></header>"
    )
    columns = (
        "#",
        "requests/s",
        "length",
        "verdict",
        "answers/s",
        "TTFT p99 ms",
        "TPOT p99 ms",
        "remarks",
    )
    rows = [
        (
            link_to_run(Path(one.folder), folder, str(i)),
            f"{one.rate:.5g}",
            "full" if one.full else "short",
            "VALID" if one.valid else "INVALID",
            f"{one.completed:.5g}",
            *(cell(one.figures.get(f"{name}_p99_ms")) for name in ("ttft", "tpot")),
            "; ".join(filter(None, [one.why, *one.doubts])),
        )
        for i, one in enumerate(tests, 1)
    ]
    body = (head, chart_section("Latency against rate", charts, _NOTE), section("All tests", columns, rows))
    return document(f"find-max-qps: {folder.absolute().name}", body, charts)


def _p99_ms(one: Tried, name: str) -> float | None:
    """Return the 99th percentile of a latency; of a test that was stopped, of its answers until then."""
    if one.figures:
        return one.figures.get(f"{name}_p99_ms")
    try:
        rows = read_requests(Path(one.folder))
    except ConfigError:  # it answered none
        return None
    values = rows["ttft"] if name == "ttft" else tpot_s(rows)
    values = values[np.isfinite(values)]
    return 1e3 * quantile(values, 0.99) if len(values) else None


def _curve(tests: Sequence[Tried], name: str, title: str, limit: float | None) -> Chart | None:
    """Return the 99th percentile of a latency against the rate; None if no test tells it."""
    known = sorted(
        (one.rate, ms, one.valid, i) for i, one in enumerate(tests, 1) if (ms := _p99_ms(one, name))
    )
    if not known:
        return None
    lines = [("VALID", [round(y, 4) if valid else None for _, y, valid, _ in known], _VALID)]
    if any(not valid for _, _, valid, _ in known):
        lines.append(("not VALID", [None if valid else round(y, 4) for _, y, valid, _ in known], _NOT))
    names = [f"{i} {x:.5g}/s, {'full' if tests[i - 1].full else 'short'}" for x, _, _, i in known]
    chart = Chart(f"rate-{name}", f"{title}, p99", "ms", [x for x, *_ in known], lines, "requests/s offered")
    chart.names = names
    chart.y_limit = ("limit", limit) if limit else None
    return chart
