"""Links between the pages lead somewhere, and every page is reached from README.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
]
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files that a page links to in this repository, each with its anchor."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text):
        if "://" not in target and not target.startswith("mailto:"):
            yield (page.parent / target).resolve() if target else page, anchor


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), f"{page.name} links to {target}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.name} links to #{anchor} of {target.name}"


def test_the_readme_leads_to_every_page() -> None:
    """By at most three links."""
    reached = {ROOT / "README.md"}
    for _ in range(3):
        reached |= {
            target
            for page in reached
            if page.suffix == ".md"
            for target, _ in links(page)
            if target.is_file()
        }
    missed = [str(page.relative_to(ROOT)) for page in PAGES if page not in reached]
    assert not missed
