"""The page of a sweep: the Pareto curve, and the table of all points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpillm.experiments.grouped_doubts import grouped_doubts
from mpillm.experiments.option_grid import pareto
from mpillm.experiments.table import cell, values_text
from mpillm.report.page.charts import Chart
from mpillm.report.page.document import chart_section, document, doubts_list, escape, link_to_run, section

COLUMNS = {
    "status": "verdict",
    "samples_per_second": "samples/s",
    "tokens_per_second": "tokens/s",
    "tokens_per_second_per_gpu": "tokens/s per {of}",
    "tokens_per_second_per_user": "tokens/s per user",
    "ttft_p99_ms": "TTFT p99 ms",
    "tpot_p99_ms": "TPOT p99 ms",
}
"""What the tables of a sweep show of each point; {of}: GPU or rank."""

_NOTE = (
    "Up and to the right is better. The line is the Pareto curve: no other point has more of both; kinds of"
    " servers, clients or cores have one each. Point at one to read what it is."
)
_COMPARED = ("server", "harness", "core_type")  # options of which each value has a curve of its own
_OTHERS = 7  # the colour of points on no curve


def sweep_page(
    folder: Path,
    found: Sequence[Mapping[str, Any]],
    front: Sequence[int],
    fixed: Mapping[str, str] | None = None,
) -> str:
    """Return the page. `found`: the points, as `sweep --output` writes them; `front`: those on the curve.

    `fixed`: the options that all points have.
    """
    of = per(found)
    charts = [chart] if (chart := pareto_chart(found, front, of)) else []
    failed = sum(one["status"] == "FAILED" for one in found)
    refused = sum(found[i]["status"] == "INVALID" for i in front)
    on_curve = f" (<strong>{refused} of these INVALID</strong>)" if refused else ""
    head = (
        f"<header><h1>{escape(folder.absolute().name)}</h1><p>{len(found)} points, {len(front)} on the Pareto"
        f" curve{on_curve}{f', <strong>{failed} failed</strong>' if failed else ''}</p>"
        f"{doubts_list(doubtful_points(found))}</header>"
    )
    curve = chart_section("The Pareto curve", charts, _NOTE, wide=True)
    if not charts:
        curve = (
            '<section class="missing"><h2>No Pareto curve</h2><p>No point has a time per output token:'
            " answers of one token have none, nor have cores that tell only whole answers, and tokens that"
            " come at once have 0.</p></section>"
        )
    same = section("Options of all points", ("option", "value"), list((fixed or {}).items()))
    return document(
        f"sweep: {folder.absolute().name}", (head, curve, _table(folder, found, front, of), same), charts
    )


def doubtful_points(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the doubts of points, a line for each kind."""
    return grouped_doubts(
        (values_text(one) or "the run", doubt) for one in found for doubt in one.get("doubts", ())
    )


def per(found: Sequence[Mapping[str, Any]]) -> str:
    """Return by what throughput is divided: GPU, or rank where there is none."""
    return next((str(one["of"]) for one in found if "of" in one), "rank")


def _table(folder: Path, found: Sequence[Mapping[str, Any]], front: Sequence[int], of: str) -> str:
    names = list(found[0]["options"])
    rows = []
    for i, one in enumerate(found):
        number = link_to_run(Path(one["run"]), folder, str(i + 1))
        cells = [cell(one.get(key)) for key in COLUMNS]
        rows.append([number, *one["options"].values(), *cells, "★" if i in front else ""])
    columns = ["#", *names, *(text.format(of=of) for text in COLUMNS.values()), "Pareto"]
    why = "".join(
        f"<li><strong>{i + 1}</strong> {escape(values_text(one))}<pre>{escape(one['why'])}</pre></li>"
        for i, one in enumerate(found)
        if one.get("why")
    )
    failed = f'<section class="failed"><h2>What failed</h2><ul>{why}</ul></section>' if why else ""
    return section("All points", columns, rows) + failed


def pareto_chart(found: Sequence[Mapping[str, Any]], front: Sequence[int], of: str) -> Chart | None:
    """Return throughput against speed for each user; None if no point has both."""
    known = sorted(
        (
            (one["tokens_per_second_per_user"], one["tokens_per_second_per_gpu"], i)
            for i, one in enumerate(found)
            if one.get("tokens_per_second_per_user") and one.get("tokens_per_second_per_gpu")
        ),
    )
    if not known:
        return None
    lines = _curves(found, [i for *_, i in known], front)
    refused = [at for at, (*_, i) in enumerate(known) if found[i].get("status") == "INVALID"]
    return Chart(
        "pareto",
        f"tokens/s per {of}, against tokens/s per user",
        f"tokens/s per {of}",
        [round(x, 4) for x, _, _ in known],
        [
            (label, [round(y, 4) if i in some else None for _, y, i in known], colour)
            for label, some, colour in lines
        ],
        "tokens/s per user",
        names=[f"{i + 1} {values_text(found[i])}{_verdict(found[i])}" for _, _, i in known],
        joined=sum(colour != _OTHERS for *_, colour in lines),
        crossed=("INVALID", refused) if refused else None,
    )


def _verdict(one: Mapping[str, Any]) -> str:
    """Return the verdict of a point that is INVALID, for its name; else ""."""
    return ", INVALID" if one.get("status") == "INVALID" else ""


def _curves(
    found: Sequence[Mapping[str, Any]], known: Sequence[int], front: Sequence[int]
) -> list[tuple[str, set[int], int]]:
    """Return the lines of the chart: label, points, colour. Each kind that is compared has its own."""
    options = {name: {found[i]["options"].get(name) for i in known} for name in _COMPARED}
    by = next((name for name, values in options.items() if len(values) > 1), None)
    curves = [("Pareto curve", {*front}, 0)]
    if by is not None:
        kinds = dict.fromkeys(found[i]["options"][by] for i in sorted(known))
        curves = []
        for colour, kind in enumerate(kinds):
            own = [i for i in known if found[i]["options"][by] == kind]
            curves.append((kind, {own[i] for i in pareto([found[i] for i in own])}, colour % _OTHERS))
    rest = {*known}.difference(*(points for _, points, _ in curves))
    return [*curves, *([("other points", rest, _OTHERS)] if rest else [])]
