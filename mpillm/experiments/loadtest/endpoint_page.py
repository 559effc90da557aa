"""HTML report of `bench endpoint`: distributions, latencies over time, figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mpillm.experiments.loadtest.load_test import Record
from mpillm.report.page.charts import Chart, distribution
from mpillm.report.page.document import CDF, chart_section, document, escape, section

_MAX_BINS = 120
_OF: dict[str, tuple[str, Callable[[Record], float]]] = {
    "ttft": ("Time to first token", lambda one: one.ttft),
    "tpot": ("Time per output token", lambda one: one.tpot),
    "e2el": ("End to end", lambda one: one.latency),
}


def endpoint_page(
    title: str,
    result: Mapping[str, Any],
    records: Sequence[Record],
    lines: Sequence[str],
    verdict: Sequence[str],
) -> str:
    """Return the HTML. `lines`, `verdict`: as on the console."""
    limits = result.get("limits_ms", {})
    good = [one for one in records if not one.error]
    cdfs = []
    for name, (label, of) in _OF.items():
        ms = [1e3 * of(one) for one in good if of(one) > 0]
        if ms:
            chart = distribution(f"cdf-{name}", label, ms)
            chart.limit = ("limit", limits[name]) if name in limits else None
            cdfs.append(chart)
    times = _over_time(good)
    rate = result["request_rate"]
    load = "all simultaneously" if rate == "inf" else f"{rate:g} requests/s"
    failed = f", <strong>{result['failed']:,} failed</strong>" if result["failed"] else ""
    head = (
        f"<header><h1>{escape(title)}</h1><p>{escape(result['model_id'])} ·"
        f" {result['num_prompts']:,} requests, {load}{failed}</p>{_judged(result, verdict)}</header>"
    )
    rows = [line.rsplit(":", 1) for line in lines if ":" in line and not line.startswith("=")]
    body = (
        head,
        chart_section("Latencies", cdfs, CDF),
        chart_section("Over time", times, ""),
        section("Figures", ("", ""), [(name, value.strip()) for name, value in rows]),
    )
    return document(f"bench endpoint: {title}", body, (*cdfs, *times))


def _judged(result: Mapping[str, Any], verdict: Sequence[str]) -> str:
    """Return the verdict on the limits; "" without limits."""
    if not verdict:
        return ""
    kind = "better" if result["limits_met"] else "worse"
    lines = "".join(f"<li>{escape(line.strip())}</li>" for line in verdict[1:])
    return f'<p><strong class="{kind}">{escape(verdict[0])}</strong></p><ul>{lines}</ul>'


def _over_time(good: Sequence[Record]) -> list[Chart]:
    """Return charts of requests in flight, answers per second, and first tokens, over time."""
    if len(good) < 2:
        return []
    first = min(one.start for one in good)
    starts = np.array([one.start - first for one in good])
    ends = starts + np.array([one.latency for one in good])
    step = max(float(ends.max()) / _MAX_BINS, 0.1)
    grid = np.arange(0, float(ends.max()) + step, step)
    open_ = np.searchsorted(np.sort(starts), grid, "right") - np.searchsorted(np.sort(ends), grid, "right")
    answered = np.diff(np.searchsorted(np.sort(ends), grid, "right"), prepend=0) / step
    waits = np.full(len(grid), np.nan)
    bins = np.minimum((starts / step).astype(int), len(grid) - 1)
    ttfts = 1e3 * np.array([one.ttft for one in good])
    for i in np.unique(bins):
        waits[i] = np.median(ttfts[bins == i])
    x = np.round(grid, 3).tolist()
    return [
        Chart("open", "Requests in flight", "", x, [("requests", open_.tolist(), 0)]),
        Chart("answers", "Answered", "requests/s", x, [("answers", answered.round(3).tolist(), 6)]),
        Chart(
            "first",
            "Time to first token, median by when requests were sent",
            "ms",
            x,
            [("first token", [None if v != v else round(v, 3) for v in waits.tolist()], 1)],
        ),
    ]
