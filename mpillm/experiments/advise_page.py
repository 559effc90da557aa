"""The page of advise: the curve of what is possible, and the proposals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpillm.experiments.option_grid import pareto
from mpillm.experiments.sweep_page import pareto_chart
from mpillm.experiments.table import cell
from mpillm.report.page.document import chart_section, document, escape, section

_NOTE = (
    "Each point is a way to use the ranks, as simulated, with its number in the table. Up and to the right is"
    " better; no other point has more of both than those on the line."
)


def advise_page(
    folder: Path, predicted: Sequence[tuple[str, Mapping[str, Any]]], of: str, proposals: str, errors: str
) -> str:
    """Return the page. `predicted`: each way and its figures; `errors`: of what was verified, or ""."""
    found = [{"options": {"": label}, **figures} for label, figures in predicted]
    front = pareto(found)
    charts = [chart] if (chart := pareto_chart(found, front, of)) else []
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
