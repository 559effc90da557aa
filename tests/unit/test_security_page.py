"""Each row of the table of attacks in docs/reference/security.md names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "security.md"


def rows() -> list[list[str]]:
    """Return the cells of the table of attacks, without those that only part it."""
    _, _, text = PAGE.read_text().partition("\n## Attacks\n")
    found = [
        [cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines() if line[:1] == "|"
    ]
    return [row for row in found[2:] if not row[0].startswith("**")]


def test_each_attack_has_a_test() -> None:
    assert len(rows()) > 40
    for attack, before, now, test in rows():
        match = re.fullmatch(r"`([\w/]+\.py)::(test_\w+)`", test)
        assert attack and before and now and match, attack
        tree = ast.parse((ROOT / "tests" / match[1]).read_text())
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert match[2] in names, test


def test_no_attack_stands_there_twice() -> None:
    attacks = [row[0] for row in rows()]
    assert len(attacks) == len({*attacks})
