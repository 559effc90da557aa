"""Where tests are, and how they replace what they test with."""

from __future__ import annotations

from pathlib import Path

MAX_REPLACED = 246  # names in modules and classes; make it smaller where you remove some
ROOT = Path(__file__).parents[2]
UNIT = ROOT / "tests" / "unit"


def test_folders_of_unit_tests_are_packages() -> None:
    """Each has the tests of one package; `fuzz` alone is for readers of every package."""
    folders = [path.relative_to(UNIT) for path in UNIT.rglob("*") if [*path.glob("test_*.py")]]
    assert [
        str(folder)
        for folder in folders
        if not (ROOT / "mpillm" / folder).is_dir() and not (ROOT / folder).is_dir()
    ] == ["fuzz"]


def test_few_names_are_replaced() -> None:
    """A double comes through a constructor or an argument, where the product has one."""
    replaced = "monkeypatch.set" + "attr"
    n = sum(path.read_text(encoding="utf-8").count(replaced) for path in (ROOT / "tests").rglob("*.py"))
    assert n <= MAX_REPLACED
