"""Numbers as the console and HTML reports write them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mpillm
from mpillm.report.numbers import rate_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.05, "0.05"),
        (12.344, "12.34"),
        (999.96, "1000"),
        (7131.4, "7,131"),
        (19250.0, "19,250"),
        (1.5e6, "1,500,000"),
    ],
)
def test_rates(value: float, text: str) -> None:
    assert rate_text(value) == text


def test_no_rate_has_an_exponent() -> None:
    """.4g writes 19,250 tokens/s as 1.925e+04."""
    units = r"\.[34]g\} (tokens|requests|queries|samples|turns|per (second|user))"
    lines = [
        f"{path}: {line.strip()}"
        for path in Path(mpillm.__path__[0]).rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(units, line)
    ]
    assert lines == []
