"""`index.html` of a folder of runs: what `mpillm runs` lists, with links.

page.js filters, sorts and groups the list.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from mpillm.report.numbers import milliseconds, short
from mpillm.report.page.document import Html, breakable, document, escape, link, link_to_run
from mpillm.report.run_list import ListedRun

_GOOD, _BAD = ("VALID", "SERVED"), ("INVALID", "FAILED")
_FIGURES = (("tokens_per_second", ""), ("samples_per_second", ""), ("ttft_ms", "p99"), ("tpot_ms", "p99"))
COLUMNS = ("started", "verdict", "tokens/s", "samples/s", "TTFT p99", "TPOT p99")
"""The columns of a list of runs, without the run itself and its path."""
_PAGE_COLUMNS = ("run", "verdict", "what", "started", *COLUMNS[2:])
_GROUPS = {"": "nothing", "series": "series", "2": "what", "1": "verdict"}  # values: see page.js


def index_page(folder: Path, runs: Sequence[ListedRun], series: Sequence[Path]) -> str:
    """Return the page, single runs first. `series`: pages of commands that start several runs."""
    ordered = sorted(runs, key=lambda one: bool(one.series))
    n_parts = sum(bool(one.series) for one in runs)
    pages = "".join(f"<li>{link(os.path.relpath(page, folder))}</li>" for page in series)
    head = f"<header><h1>{escape(folder)}</h1><p>{len(runs):,} runs, newest first</p></header>"
    several = f"<section><h2>Several runs together</h2><ul>{pages}</ul></section>" if pages else ""
    names = "".join(f'<th><span class="sorts">{escape(name)}</span></th>' for name in _PAGE_COLUMNS)
    rows = "".join(_row(one, folder) for one in ordered)
    table = f'<table class="list"><thead><tr>{names}</tr></thead><tbody>{rows}</tbody></table>'
    listed = f'<h2>Runs</h2>{_controls(n_parts, len(runs))}<div class="scroll" tabindex="0">{table}</div>'
    return document(f"runs: {folder}", (head, f"<section>{listed}</section>", several), [])


def _controls(n_parts: int, n_runs: int) -> str:
    """Return the filter, the switch for runs of series, and the choice of groups."""
    checked = " checked" if n_parts == n_runs else ""
    switch = (
        f'<label><input type="checkbox" id="parts"{checked}> {n_parts:,} runs of sweeps, searches and other'
        " series</label>"
    )
    choices = "".join(f'<option value="{value}">{name}</option>' for value, name in _GROUPS.items())
    return (
        '<p class="controls js-only">'
        '<label>filter <input type="search" id="filter" placeholder="words"></label>'
        f'{switch}<label>group by <select id="group">{choices}</select></label>'
        '<span class="note" id="count"></span></p>'
    )


def _row(one: ListedRun, folder: Path) -> str:
    """Return a row; page.js sorts by the cells' `data-v`."""
    started, _, *figures = cells_of(one)
    values = [one.figure(*name) for name in _FIGURES]
    cells = [
        f"<td>{_link(one, folder)}</td><td>{_verdict(one)}</td><td>{escape(one.title)}</td>",
        f'<td class="time" data-v="{one.started:.0f}">{escape(started)}</td>',
        *(
            f'<td data-v="{"" if value is None else f"{value:g}"}">{escape(text)}</td>'
            for value, text in zip(values, figures, strict=True)
        ),
    ]
    return f'<tr data-series="{escape(one.series)}">{"".join(cells)}</tr>'


def cells_of(one: ListedRun) -> list[str]:
    """Return the cells of a run in a list of runs, by `COLUMNS`."""
    rates, latencies = _FIGURES[:2], _FIGURES[2:]
    return [
        time.strftime("%Y-%m-%d %H:%M", time.localtime(one.started)),
        one.verdict,
        *("-" if (value := one.figure(*name)) is None else short(value) for name in rates),
        *("-" if (value := one.figure(*name)) is None else milliseconds(value) for name in latencies),
    ]


def _verdict(one: ListedRun) -> Html:
    kind = "worse" if one.status in _BAD else "better" if one.status in _GOOD and not one.is_doubtful else ""
    return Html(f'<span class="{kind}">{escape(one.verdict)}</span>')


def _link(one: ListedRun, folder: Path) -> Html:
    return link_to_run(one.path, folder, breakable(os.path.relpath(one.path, folder)))
