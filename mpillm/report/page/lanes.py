"""The lanes of ranks: what each did and when, thinned to what a page can hold."""

from __future__ import annotations

from typing import Any

from mpillm.report.page.facts import Facts

_MOST_ROWS = 64
_MOST_SPANS = 24_000  # of all rows: a megabyte of the page
_PHASE_S = 0.005  # shorter phases can't be seen


def lane_rows(facts: Facts) -> list[dict[str, Any]]:
    """Return a row for each rank: label, spans of its steps and handoffs, its phases."""
    instance_of = {rank: one for one in facts.instances.values() for rank in one.ranks}
    rows = []
    ranks = sorted(facts.noted)[:_MOST_ROWS]
    for rank in ranks:
        noted, one = facts.noted[rank], instance_of.get(rank)
        who = one.name if one else _control(facts, rank)
        most = max(100, _MOST_SPANS // len(ranks) // 2)
        rows.append(
            {
                "label": f"{rank} {who}".strip(),
                **{lane: _thinned(noted.get(lane) or {}, most) for lane in ("steps", "handoffs")},
                "phases": [phase for phase in noted.get("phases") or [] if phase[2] - phase[1] >= _PHASE_S],
            }
        )
    return rows


def shown_window(facts: Facts) -> tuple[float, float]:
    """Return from when to when lanes are shown at first: the test."""
    return 0.0, max(facts.test_s, 1e-3)


def _control(facts: Facts, rank: int) -> str:
    plan = {one.get("rank"): one for one in facts.run.plan_ranks}
    return " + ".join(plan.get(rank, {}).get("roles") or [])


def _thinned(lane: dict[str, list[Any]], most: int) -> dict[str, list[Any]]:
    """Return the spans; neighbours as one where there are more than `most`."""
    names = ("start", "end", "busy_s", "n", "kind")
    columns = [lane.get(name) or [] for name in names]
    n = min(map(len, columns))
    step = -(-n // most) if n else 1
    if step > 1:
        starts, ends, busy, counts, kinds = columns
        blocks = [slice(i, min(i + step, n)) for i in range(0, n, step)]
        columns = [
            [starts[block.start] for block in blocks],
            [max(ends[block]) for block in blocks],
            [round(sum(busy[block]), 5) for block in blocks],
            [sum(counts[block]) for block in blocks],
            [max(kinds[block], key=kinds[block].count) for block in blocks],
        ]
    return dict(zip(names, columns, strict=True))
