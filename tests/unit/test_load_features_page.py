"""docs/reference/load_features.md: mpillm's options exist, and it names the features that mpillm lacks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mpillm.experiments.bench import bench_endpoint
from mpillm.experiments.commands import ab, find_max_qps, sweep
from mpillm.options.field import Options
from mpillm.options.fields import BY_NAME

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "load_features.md").read_text(encoding="utf-8")
NONE = "\N{EN DASH}"
COMMANDS: dict[str, type[Options]] = {
    "bench endpoint": bench_endpoint.Options,
    "find-max-qps": find_max_qps.Options,
    "ab": ab.Options,
    "sweep": sweep.Options,
}


def rows(columns: str) -> list[list[str]]:
    """Return the cells of the tables whose first line begins with `columns`."""
    tables = re.findall(rf"^\| {re.escape(columns)} .*\n\|---.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    return [
        [cell.strip() for cell in line[1:-1].split("|")] for table in tables for line in table.splitlines()
    ]


ROWS = rows("feature | mpillm")


def test_there_are_rows() -> None:
    assert len(ROWS) > 90 and {len(row) for row in ROWS} == {7}
    assert len({row[0] for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_mpillm_has_the_feature_by_options_that_exist(row: list[str]) -> None:
    cell = row[1]
    options = re.findall(r"`(?:([a-z -]+?) )?--(\w+)`", cell)
    assert options or "✓" in cell or "](" in cell, "a feature names its options, or its page"
    for command, name in options:
        known = {one.name for one in COMMANDS[command].declared()} if command else BY_NAME.keys()
        assert name in known, f"{command} --{name}"


def test_missing_features_are_those_of_two_others() -> None:
    """Today the page has no table of them."""
    missing = rows("feature | AIPerf")
    assert all(sum(cell != NONE for cell in row[1:]) >= 2 for row in missing)
