"""`report.html`: a run in one file that needs nothing else, and no network.

Tables and pictures are there without JavaScript; page.js puts uPlot's charts, and lanes that zoom, in their
place.
"""

from __future__ import annotations

import html
import json
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from mpillm import __version__
from mpillm.files import write_text
from mpillm.report.page import sections, svg
from mpillm.report.page.charts import Chart, distributions, machines, over_time
from mpillm.report.page.facts import Facts, facts_of
from mpillm.report.page.lanes import lane_rows, shown_window
from mpillm.report.page.trace import write_trace
from mpillm.report.run_directory import PAGE, TELEMETRY, TRACE, path_shown
from mpillm.report.run_files import RunFiles

_log = logging.getLogger(__name__)
_ZOOM = "Drag over a chart to zoom, double-click or press 0 to see all again."
_CDF = "What share of the samples took at most so long. Log scale of time."
_ASSETS = Path(__file__).parent / "assets"


def leave_page(
    path: Path, write_telemetry: Callable[[Path], None], price_per_gpu_hour: float | None = None
) -> str:
    """Write telemetry.json, report.html and trace.json of the run that ends in `path`.

    Return the page's path for the console, or why there is none: whatever is wrong here is not worth a test's
    result, which is written by now.
    """
    try:
        write_telemetry(path / TELEMETRY)
        return path_shown(write_page(path, price_per_gpu_hour))
    except Exception as error:  # noqa: BLE001 - see above
        _log.exception("the run has no page")
        return f"none: {type(error).__name__}: {error}"


def write_page(path: Path, price_per_gpu_hour: float | None = None) -> Path:
    """Write report.html and trace.json from the files of a run; return the page's path.

    `price_per_gpu_hour`: None: as the run was told. Raises ConfigError if `path` is no run directory, OSError
    if a file can't be written.
    """
    run = RunFiles.read(path)
    write_text(path / PAGE, page(run, price_per_gpu_hour))
    write_trace(run, path / TRACE)
    return path / PAGE


def page(run: RunFiles, price_per_gpu_hour: float | None = None) -> str:
    """Return the HTML of a run's page."""
    if price_per_gpu_hour is None:
        price_per_gpu_hour = run.value("price_per_gpu_hour")
    facts, damaged = facts_of(run)
    notes = [*run.missing, *damaged]

    def made(what: str, part: Callable[..., Any], empty: Any, *arguments: object) -> Any:
        """Return a part of the page; `empty` if the files that it is made of are damaged."""
        try:
            return part(*arguments)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            _log.info("%s: %s", what, error, exc_info=True)
            notes.append(f"{what}: a file is damaged ({type(error).__name__}: {error})")
            return empty

    times = made("what happened over time", over_time, [], facts)
    latencies = made("latencies", distributions, [], facts)
    hardware = made("CPUs and GPUs", machines, [], facts)
    rows = made("what each rank did", lane_rows, [], facts)
    start, end = shown_window(facts)
    top = made("verdict", sections.head, "", facts)
    parts = [
        made("failures", sections.failures, "", run),
        made("figures", sections.tiles, "", facts, price_per_gpu_hour),
        made("the plan", sections.plan, "", facts),
        made("charts", _charts, "", "Over time", times, _ZOOM),
        made("charts", _charts, "", "Latencies", latencies, _CDF),
        made("lanes", _lanes, "", rows, start, end, facts),
        made("charts", _charts, "", "Processors", hardware, ""),
        made("energy", sections.energy, "", facts, price_per_gpu_hour),
        made("tables", sections.figures, "", facts),
        made("options", sections.options, "", run),
        made("files", sections.files, "", run),
    ]
    data = {
        "charts": [chart.to_json() for chart in (*times, *latencies, *hardware)],
        "lanes": {"rows": rows, "start": start, "end": end, "kinds": run.telemetry.get("kinds") or []},
    }
    title = html.escape(f"{run.path.absolute().name}: {run.result.get('status', 'not ended')}")
    body = [top, sections.missing(notes), *parts]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">\n'
        f"<style>{_asset('uPlot.min.css')}\n{_asset('page.css')}</style></head>\n<body>\n"
        f"<main>{''.join(body)}</main>\n"
        f"<footer>mpillm {__version__}. Charts by uPlot, MIT licence.</footer>\n"
        f'<script type="application/json" id="data">{_embedded(data)}</script>\n'
        f"<!-- uPlot:\n{_asset('uPlot.LICENSE.txt')}-->\n"
        f"<script>{_asset('uPlot.iife.min.js')}</script>\n<script>{_asset('page.js')}</script>\n"
        "</body></html>\n"
    )


def _charts(title: str, charts: list[Chart], note: str) -> str:
    if not charts:
        return ""
    figures = "".join(
        f'<figure id="{chart.name}"><figcaption>{html.escape(chart.title)}'
        f"{f' <small>{html.escape(chart.unit)}</small>' if chart.unit else ''}{_limit(chart)}</figcaption>"
        f'<div class="still">{svg.lines(chart)}</div></figure>'
        for chart in charts
    )
    said = f'<p class="note js-only">{note}</p>' if note else ""
    return f'<section><h2>{title}</h2>{said}<div class="charts">{figures}</div></section>'


def _limit(chart: Chart) -> str:
    return f' <small class="limit">limit {svg.short(chart.limit[1])} ms</small>' if chart.limit else ""


def _lanes(rows: list[dict[str, object]], start: float, end: float, facts: Facts) -> str:
    if not rows:
        return ""
    more = len(facts.noted) - len(rows)
    said = f" {more} more ranks are in trace.json." if more > 0 else ""
    key = "".join(
        f'<li><i class="k{kind}"></i>{text}</li>'
        for kind, text in enumerate(
            ("contexts", "decode", "both in a step", "requests open", "KV caches under way")
        )
    )
    return (
        '<section><h2>What each rank did</h2><p class="note">Grey is idle; the thin lane below is the'
        f' handoff.{said} <span class="js-only">Drag to zoom, or Ctrl and the wheel, double-click to see the'
        " test; with the keyboard: + and -, ← and →, 0 for all phases.</span></p>"
        f'<ul class="key">{key}</ul>'
        f'<figure id="lanes"><div class="still scroll">{svg.lanes(rows, start, end)}</div></figure></section>'
    )


def _embedded(data: object) -> str:
    """Return JSON that no text in it can end the script element with."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


@cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")
