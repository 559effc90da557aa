"""HTML report of a sweep: the Pareto curve, and the table of all points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpillm.experiments import conversation_runs
from mpillm.experiments.grouped_doubts import grouped_doubts
from mpillm.experiments.option_grid import PER_USER, pareto
from mpillm.experiments.table import cell, values_text
from mpillm.report.page.charts import Chart
from mpillm.report.page.document import chart_section, document, doubts_list, escape, link_to_run, section

_COLUMNS = {
    "status": "verdict",
    "samples_per_second": "samples/s",
    "tokens_per_second": "tokens/s",
    "tokens_per_second_per_gpu": "tokens/s per {of}",
    "tokens_per_second_per_user": "tokens/s per user",
    "ttft_p99_ms": "TTFT p99 ms",
    "tpot_p99_ms": "TPOT p99 ms",
}
"""Columns of a sweep's tables, by key of a point; {of}: GPU or rank."""
_INTERACTIVITY = "e2e_normalized_interactivity_p90"

_NOTE = (
    "Up and to the right is better. The line is the Pareto curve: no other point has more of both. Kinds of"
    " servers, clients or cores have one curve each. Point at a point to read its options."
)
_COMPARED = ("server", "harness", "core_type")  # options whose values have separate curves
_OTHERS = 7  # color of points on no curve


def sweep_page(
    folder: Path,
    points: Sequence[Mapping[str, Any]],
    front: Sequence[int],
    fixed: Mapping[str, str] | None = None,
    warning: str = "",
) -> str:
    """Return the HTML. `points`: as in `sweep --output`; `front`: indices of the points on the curve.

    `fixed`: the options of all points. `warning`: on all points together.
    """
    of = per(points)
    charts = [chart] if (chart := pareto_chart(points, front, of)) else []
    if of_requests := interactivity_chart(points, of):
        charts.append(of_requests)
    failed = sum(one["status"] == "FAILED" for one in points)
    refused = sum(points[i]["status"] == "INVALID" for i in front)
    on_curve = f" (<strong>{refused} of these INVALID</strong>)" if refused else ""
    head = (
        f"<header><h1>{escape(folder.absolute().name)}</h1><p>{len(points)} points, {len(front)} on the"
        f" Pareto curve{on_curve}{f', <strong>{failed} failed</strong>' if failed else ''}</p>"
        f"{doubts_list([*doubtful_points(points), *filter(None, [warning])])}</header>"
    )
    curve = chart_section("The Pareto curve", charts, _NOTE, wide=True)
    if not charts:
        curve = (
            '<section class="missing"><h2>No Pareto curve</h2><p>No point has a time per output token.'
            " Answers of one token and cores that only report whole answers have none. If all tokens of an"
            " answer arrive together, it is 0.</p></section>"
        )
    same = section("Options of all points", ("option", "value"), list((fixed or {}).items()))
    return document(
        f"sweep: {folder.absolute().name}", (head, curve, _table(folder, points, front, of), same), charts
    )


def doubtful_points(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the doubts of points, one line per kind."""
    return grouped_doubts(
        (values_text(one) or "the run", doubt) for one in points for doubt in one.get("doubts", ())
    )


def per(points: Sequence[Mapping[str, Any]]) -> str:
    """Return the unit that throughput is divided by: GPU, or rank if there is no GPU."""
    return next((str(one["of"]) for one in points if "of" in one), "rank")


def columns(points: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the titles of a table's columns, by key of a point. {of} in a title: GPU or rank."""
    known = {key for one in points for key, value in one.items() if value is not None}
    of_conversations = {key: text for key, text in conversation_runs.COLUMNS.items() if key in known}
    return _COLUMNS | of_conversations


def _table(folder: Path, points: Sequence[Mapping[str, Any]], front: Sequence[int], of: str) -> str:
    names, figures = list(points[0]["options"]), columns(points)
    rows = []
    for i, one in enumerate(points):
        number = link_to_run(Path(one["run"]), folder, str(i + 1))
        cells = [cell(one.get(key)) for key in figures]
        rows.append([number, *one["options"].values(), *cells, "★" if i in front else ""])
    titles = ["#", *names, *(text.format(of=of) for text in figures.values()), "Pareto"]
    why = "".join(
        f"<li><strong>{i + 1}</strong> {escape(values_text(one))}<pre>{escape(one['why'])}</pre></li>"
        for i, one in enumerate(points)
        if one.get("why")
    )
    failed = f'<section class="failed"><h2>What failed</h2><ul>{why}</ul></section>' if why else ""
    return section("All points", titles, rows) + failed


def interactivity_chart(points: Sequence[Mapping[str, Any]], of: str) -> Chart | None:
    """Return the chart of throughput against the speed that includes first tokens, as InferenceX draws it.

    Only tests of conversations have this speed; None without it.
    """
    x_label = "tokens/s per user end to end, p90"
    chart = pareto_chart(points, pareto(points, _INTERACTIVITY), of, _INTERACTIVITY, x_label)
    return chart and replace(chart, name="interactivity")


def pareto_chart(
    points: Sequence[Mapping[str, Any]],
    front: Sequence[int],
    of: str,
    per_user: str = PER_USER,
    x_label: str = "output tokens/s per user",
) -> Chart | None:
    """Return the chart of throughput against `per_user`, a speed per user; None if no point has both."""
    known = sorted(
        (one[per_user], one["tokens_per_second_per_gpu"], i)
        for i, one in enumerate(points)
        if one.get(per_user) and one.get("tokens_per_second_per_gpu")
    )
    if not known:
        return None
    lines = _curves(points, [i for *_, i in known], front, per_user)
    refused = [at for at, (*_, i) in enumerate(known) if points[i].get("status") == "INVALID"]
    return Chart(
        "pareto",
        f"output tokens/s per {of}, against {x_label}",
        f"output tokens/s per {of}",
        [round(x, 4) for x, _, _ in known],
        [
            (label, [round(y, 4) if i in some else None for _, y, i in known], colour)
            for label, some, colour in lines
        ],
        x_label,
        names=[f"{i + 1} {values_text(points[i])}{_verdict(points[i])}" for _, _, i in known],
        joined=sum(colour != _OTHERS for *_, colour in lines),
        crossed=("INVALID", refused) if refused else None,
    )


def _verdict(one: Mapping[str, Any]) -> str:
    """Return the suffix of an INVALID point's name; "" for other points."""
    return ", INVALID" if one.get("status") == "INVALID" else ""


def _curves(
    points: Sequence[Mapping[str, Any]], known: Sequence[int], front: Sequence[int], per_user: str
) -> list[tuple[str, set[int], int]]:
    """Return the lines of the chart: label, points, color. Each compared kind has its own line."""
    options = {name: {points[i]["options"].get(name) for i in known} for name in _COMPARED}
    by = next((name for name, values in options.items() if len(values) > 1), None)
    curves = [("Pareto curve", {*front}, 0)]
    if by is not None:
        kinds = dict.fromkeys(points[i]["options"][by] for i in sorted(known))
        curves = []
        for colour, kind in enumerate(kinds):
            own = [i for i in known if points[i]["options"][by] == kind]
            curves.append(
                (kind, {own[i] for i in pareto([points[i] for i in own], per_user)}, colour % _OTHERS)
            )
    others = {*known}.difference(*(points for _, points, _ in curves))
    return [*curves, *([("other points", others, _OTHERS)] if others else [])]
