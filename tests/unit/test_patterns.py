"""Every regular expression of the packages takes CPU time that grows linearly with its input.

The test finds the patterns in the syntax of the sources and derives the inputs from each pattern, so a new
pattern needs no entry here.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from mpillm.doctor import local_checks
from tests.helpers.growth import grows_faster
from tests.helpers.patterns import Use, texts, uses

ROOT = Path(__file__).parents[2]
SIZES = (20, 400, 4000, 30_000)  # characters
FOLDERS = sorted(
    str(folder.relative_to(ROOT))
    for folder in (ROOT / "launch", ROOT / "disagg", ROOT / "mpillm", *(ROOT / "mpillm").iterdir())
    if any(folder.glob("*.py"))
)


@cache
def found() -> tuple[list[Use], list[str]]:
    """Return the patterns of all sources; not at collection, which each process of a test run repeats."""
    return uses(ROOT, ["mpillm", "launch", "disagg"])


def folder_of(where: str) -> str:
    """Return the entry of FOLDERS that a place is in."""
    return max((folder for folder in FOLDERS if where.startswith(f"{folder}/")), key=len)


def slow(use: Use) -> str:
    """Return the first kind of input on which a pattern takes more than linear time; "" if there is none."""
    for head, pump, tail in texts(use):

        def apply(n: int, head: str = head, pump: str = pump, tail: str = tail) -> None:
            use.apply(head + pump * (n // len(pump)) + tail)

        if growth := grows_faster(apply, SIZES):
            return f"{head!r} + n * {pump!r} + {tail!r}: {growth}"
    return ""


@pytest.mark.long
@pytest.mark.parametrize("folder", FOLDERS)
def test_patterns_take_linear_time(folder: str) -> None:
    found_slow = {use.where: slow(use) for use in found()[0] if folder_of(use.where) == folder}
    assert {where: growth for where, growth in found_slow.items() if growth} == {}


@pytest.mark.long
def test_patterns_that_are_arguments() -> None:
    """`uses` finds those of `KnownFailure` and `reason`; `alone` has a table; a tokenizer has literals."""
    files = {where.partition(":")[0] for where in found()[1]}
    assert files == {
        "mpillm/doctor/local_checks.py",
        "launch/children.py",
        "launch/command.py",
        "mpillm/data/tokenizer.py",
    }
    for pattern, _ in local_checks._EXPLAINED:
        assert slow(Use("alone", pattern, re.IGNORECASE, frozenset({"search"}))) == ""


@pytest.mark.long
@pytest.mark.parametrize(
    ("pattern", "method"),
    [
        (rb'"[^"\\]*(?:\\.[^"\\]*)*"', "sub"),
        (r"([/_=,.:-]+)(?=\w)", "sub"),
        (r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,2})?", "fullmatch"),
        (r"HYDRA build details:.*?Version:\s*(\d+)", "search"),
        (r"\s*(.*?)\s*(ms|s)?\s*", "fullmatch"),
        (r"(\w+)*-", "match"),
        (r"[^<>{}$]*/[^<>{}$]*", "fullmatch"),
    ],
)
def test_slow_patterns_are_found(pattern: str | bytes, method: str) -> None:
    assert slow(Use("here", pattern, re.DOTALL, frozenset({method})))


@pytest.mark.long
def test_all_patterns_are_found() -> None:
    """Also those that are made of others."""
    here = {use.where.partition(":")[0]: use for use in found()[0]}
    assert len(found()[0]) > 80
    assert "launch/safe_text.py" in here and "mpillm/programs/servers/kind.py" in here
    assert any("gate_proj" in str(use.pattern) and "_scale" in str(use.pattern) for use in found()[0])
