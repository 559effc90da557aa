"""The page of ab: what the pairs say, and each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mpillm.experiments.table import figure
from mpillm.report.page.charts import Chart
from mpillm.report.page.document import chart_section, document, doubts_list, escape, link_to_run, section

_UNITS = {"samples_per_second": "samples/s", "tokens_per_second": "tokens/s"}


def ab_page(
    folder: Path,
    texts: Sequence[str],
    metric: str,
    pairs: Sequence[Mapping[str, Mapping[str, float]]],
    verdict: str,
    doubtful: Sequence[str] = (),
) -> str:
    """Return the page. `texts`: the options of A and of B; `verdict`, `doubtful`: as on the console."""
    unit = _UNITS.get(metric, "ms")
    numbers = [float(i) for i in range(1, len(pairs) + 1)]
    lines: list[tuple[str, list[float | None], int]] = [
        (side, [round(pair[side][metric], 6) for pair in pairs], colour) for colour, side in enumerate("AB")
    ]
    values = Chart("pairs", metric.replace("_", " "), unit, numbers, lines, "pair")
    values.names = [f"{i:g}" for i in numbers]
    head, _, test = verdict.partition("\n")
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
        f'<p>{escape(test)}</p><ul class="runs">{sides}</ul>{doubts_list(doubtful)}</header>',
        chart_section("Pairs", [values], "A and B of each pair ran one after the other."),
        section("All pairs", ("pair", f"A, {unit}", f"B, {unit}", "B against A"), rows),
    )
    return document(f"ab: {folder.absolute().name}", body, [values])
