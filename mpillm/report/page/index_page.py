"""`index.html` of a folder of runs: what `mpillm runs` lists, with links."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from mpillm.report.numbers import milliseconds, short
from mpillm.report.page.document import Html, document, escape, link, link_to_run, section
from mpillm.report.run_list import ListedRun

_GOOD, _BAD = ("VALID", "SERVED"), ("INVALID", "FAILED")
COLUMNS = ("started", "verdict", "tokens/s", "samples/s", "TTFT p99", "TPOT p99")
"""What a list of runs says of each, besides what was run and where."""


def index_page(folder: Path, runs: Sequence[ListedRun], series: Sequence[Path]) -> str:
    """Return the page. `series`: pages of commands that start several runs."""
    rows = []
    for one in runs:
        started, _, *figures = cells_of(one)
        rows.append((started, _verdict(one), one.what, *figures, _link(one, folder)))
    columns = (*COLUMNS[:2], "what", *COLUMNS[2:], "run")
    pages = "".join(f"<li>{link(os.path.relpath(page, folder))}</li>" for page in series)
    head = f"<header><h1>{escape(folder)}</h1><p>{len(runs):,} runs, newest first</p></header>"
    several = f"<section><h2>Several runs together</h2><ul>{pages}</ul></section>" if pages else ""
    return document(f"runs: {folder}", (head, section("Runs", columns, rows), several), [])


def cells_of(one: ListedRun) -> list[str]:
    """Return what a list of runs says of one, by `COLUMNS`."""
    rates = (one.figure("tokens_per_second"), one.figure("samples_per_second"))
    latencies = (one.figure("ttft_ms", "p99"), one.figure("tpot_ms", "p99"))
    return [
        time.strftime("%Y-%m-%d %H:%M", time.localtime(one.started)),
        one.verdict,
        *("-" if value is None else short(value) for value in rates),
        *("-" if value is None else milliseconds(value) for value in latencies),
    ]


def _verdict(one: ListedRun) -> Html:
    kind = "worse" if one.status in _BAD else "better" if one.status in _GOOD and not one.is_doubtful else ""
    return Html(f'<span class="{kind}">{escape(one.verdict)}</span>')


def _link(one: ListedRun, folder: Path) -> Html:
    return link_to_run(one.path, folder, os.path.relpath(one.path, folder))
