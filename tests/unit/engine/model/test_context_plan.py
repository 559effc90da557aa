"""Which contexts of a step have their cached tokens copied, and in which tiles their queries attend."""

from __future__ import annotations

from mpillm.engine.model.context_plan import MIN_QUERIES, ContextPlan
from mpillm.engine.schedule.step import Span
from mpillm.engine.shape.memory import max_copied_rows

MANY = MIN_QUERIES


def plan(spans: list[Span], most: int = 10_000) -> ContextPlan:
    starts = [sum(span.n_new for span in spans[:i]) for i in range(len(spans))]
    return ContextPlan.of(spans, starts, 48, most)


def test_rows_of_each_kind() -> None:
    """Every new token is in one tile, whose keys begin at the right row: of the step, or of the copies."""
    spans = [Span(7, 0, 60), Span(3, 500, MANY), Span(4, 20, MANY - 1), Span(5, 1, MANY + 1), Span(2, 0, 1)]
    found = plan(spans)
    fresh, copied, in_blocks = (tiles.tolist() for tiles in found.tiles)
    assert fresh == [[48, 12, 48, 7, 0, 0], [0, 48, 0, 7, 0, 0], [60 + 3 * MANY, 1, 0, 2, 0, 60 + 3 * MANY]]
    second = 640  # 628 rows and what pads them
    assert found.copies.tolist() == [[3, 500 + MANY, 0], [5, MANY + 2, second]]
    assert (found.n_copied, found.longest) == (second + 192, 500 + MANY)
    assert {tuple(tile[3:]) for tile in copied} == {(3, 0, 0), (5, 0, second)}
    assert {tuple(tile[3:]) for tile in in_blocks} == {(4, 20, 60 + MANY)}
    rows = [
        row
        for tiles in (fresh, copied, in_blocks)
        for first, n, *_ in tiles
        for row in range(first, first + n)
    ]
    assert sorted(rows) == list(range(sum(span.n_new for span in spans)))
    for tiles in (fresh, copied, in_blocks):
        assert [tile[2] for tile in tiles] == sorted((tile[2] for tile in tiles), reverse=True)


def test_copies_are_bounded() -> None:
    """What no longer fits is read in its blocks."""
    spans = [Span(slot, 1000, MANY) for slot in range(3)]
    found = plan(spans, most=2 * 1152)
    assert [slot for slot, _, _ in found.copies.tolist()] == [0, 1]
    assert {tile[3] for tile in found.tiles[2].tolist()} == {2}
    assert [max_copied_rows(n) for n in (4096, 4097, 1 << 20)] == [4096, 4160, 65536]
