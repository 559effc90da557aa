"""Pages name the families and the workloads of the embedded engine as the tables in the code do."""

from __future__ import annotations

import re
from pathlib import Path

from mpillm.engine.shape.families.known import FAMILIES, MODEL_TYPES
from mpillm.workloads import WORKLOADS

DOCS = Path("docs/reference")
TITLES = [family.title for family in FAMILIES.values()]


def test_every_family_has_a_title_and_a_model_type() -> None:
    assert all(TITLES) and len(set(TITLES)) == len(TITLES)
    assert list(MODEL_TYPES.values()) == list(FAMILIES)


def test_what_was_tested_names_all_families() -> None:
    text = (DOCS / "tested.md").read_text()
    assert text.count(f"{', '.join(TITLES[:-1])} and {TITLES[-1]}") == 1


def test_the_readme_names_some() -> None:
    found = re.search(r"NVIDIA GPUs \(([^\n\[]*) and\s", Path("README.md").read_text())
    assert found is not None and set(found[1].split(", ")) <= set(TITLES)


def test_the_table_of_workloads_names_the_family_of_each() -> None:
    rows = {
        match[1]: match[2]
        for match in re.finditer(
            r"^\| `([^`]+)` \|(?:[^|\n]*\|){7} ([^|\n]+) \|$",
            (DOCS / "workloads.md").read_text(),
            re.MULTILINE,
        )
    }
    for name, workload in WORKLOADS.items():
        family = FAMILIES.get(workload.architecture)
        assert rows[name] == (family.title if family is not None else "no"), name
