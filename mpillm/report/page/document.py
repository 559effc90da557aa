"""The frame of every HTML report, and its elements: sections, tables, charts.

A page is one file that needs no other files and no network. It has tables and pictures without JavaScript.
With JavaScript, page.js replaces the pictures by uPlot's charts, and by ranks' lanes that can be zoomed.
"""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mpillm.report.numbers import milliseconds
from mpillm.report.page import svg
from mpillm.report.page.charts import Chart
from mpillm.report.run_directory import PAGE
from mpillm.version import __version__

ZOOM = "Drag over a chart to zoom, double-click or press 0 to see all again."
CDF = "The share of the samples that took at most this time. Log scale of time."
_QUANTITY = re.compile(r"^([\d.,]+) (\S{1,3})$")
_LONG = re.compile(r"[^\s\N{NO-BREAK SPACE}]{13,}")
_MARK = re.compile(r"(?<=[/_=,.:-])(?=[^\W_])")
_SENTENCES = ("remarks",)  # columns that keep a width where the table is wider than the window
_TOGETHER = "\\1\N{NO-BREAK SPACE}\\2"
_ASSETS = Path(__file__).parent / "assets"


class Html(str):
    """A text that is HTML already: `escape` does not change it."""

    __slots__ = ()


def escape(value: object) -> Html:
    """Return a value as HTML."""
    return value if isinstance(value, Html) else Html(html.escape(str(value)))


def document(
    title: str, body: Iterable[str], charts: Sequence[Chart], lanes: Mapping[str, Any] | None = None
) -> str:
    """Return a whole page. `charts`, `lanes`: data that page.js draws into their elements in `body`."""
    data = {"charts": [chart.to_json() for chart in charts], "lanes": lanes}
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
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


def chart_section(title: str, charts: Sequence[Chart], note: str, wide: bool = False) -> str:
    """Return the charts as a section; `note`: how to use them, with JavaScript."""
    if not charts:
        return ""
    figures = "".join(
        f'<figure id="{chart.name}"><figcaption>{escape(chart.title)}'
        f"{f' <small>{escape(chart.unit)}</small>' if chart.unit else ''}{_limit(chart)}</figcaption>"
        f'<div class="still">{svg.lines(chart, wide)}</div></figure>'
        for chart in charts
    )
    note_html = f'<p class="note js-only">{note}</p>' if note else ""
    return (
        f"<section><h2>{escape(title)}</h2>{note_html}"
        f'<div class="charts{" wide" if wide else ""}">{figures}</div></section>'
    )


def _limit(chart: Chart) -> str:
    """Return the limit of a chart and what its crosses mean, for its caption."""
    limit = chart.limit or chart.y_limit
    texts = [f"{limit[0]} {milliseconds(limit[1])}"] if limit else []
    texts += [f"✕ {chart.crossed[0]}"] if chart.crossed else []
    return "".join(f' <small class="limit">{escape(text)}</small>' for text in texts)


def link_to_run(run: Path, folder: Path, text: str) -> Html:
    """Return `text`, as a link to the run's HTML report if the run has one."""
    page = run.absolute() / PAGE
    if not page.exists():
        return escape(text)
    return link(os.path.relpath(page, folder.absolute()), text)


def link(path: str, text: str = "") -> Html:
    """Return a link to a file. `path`: from the page's folder; `text`: by default the path."""
    # Quoted: a file may be called javascript:x, or have a # or a % in its name.
    return Html(f'<a href="{escape(quote(path))}">{escape(text or path)}</a>')


def doubts_list(doubts: Sequence[str]) -> Html:
    """Return doubts about runs as a list; nothing without doubts."""
    lines = "".join(f"<li>{escape(doubt)}</li>" for doubt in doubts)
    return Html(f"<p><strong>Doubtful:</strong></p><ul>{lines}</ul>" if doubts else "")


def section(title: str, names: Sequence[str], rows: Sequence[Sequence[Any]], more: str = "") -> str:
    """Return a table under its title; nothing if there are neither rows nor `more`."""
    return f"<section><h2>{escape(title)}</h2>{table(names, rows)}{more}</section>" if rows or more else ""


def table(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table with a row of names above; a number stays beside its unit."""
    head_cells = "".join(
        f"<th{' class=said' if name in _SENTENCES else ''}>{escape(name)}</th>" for name in names
    )
    body = "".join(f"<tr>{''.join(f'<td>{_cell(cell)}</td>' for cell in row)}</tr>" for row in rows)
    rows_ = f"<thead><tr>{head_cells}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll" tabindex="0"><table>{rows_}</table></div>'


def breakable(text: str) -> Html:
    """Return a long name or path as HTML; a line may break after its punctuation."""
    return Html(_LONG.sub(_breakable, escape(text)))


def _cell(value: object) -> str:
    """Return a cell: a number stays beside its unit, a long name or path may break after punctuation."""
    text = _QUANTITY.sub(_TOGETHER, escape(value))
    return text if isinstance(value, Html) else _LONG.sub(_breakable, text)


def _breakable(word: re.Match[str]) -> str:
    return _MARK.sub("<wbr>", word[0])


def _embedded(data: object) -> str:
    """Return JSON in which no text can end the script element."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


@cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")
