"""The fuzzers' rounds: with a seed the same for everybody, no two alike, named where one fails."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.helpers import fuzzing
from tests.helpers.fuzzing import ODD_VALUE, Search, changed


def rounds(folder: Path, first: int, n: int) -> list[list[str]]:
    """Return what the examples of `n` rounds are, from the seed `first` on."""
    found = []
    for number in range(first, first + n):
        search = Search(1e-9, number)  # a round
        drawn: list[str] = []

        @fuzzing.fuzz(changed([{"a": [1, 2], "b": "c"}]), ODD_VALUE, st.text(), st.floats(), search=search)
        def read(_: Path, *values: Any, into: list[str] = drawn) -> None:
            into.append(repr(values))

        read(folder)
        found.append(drawn)
    return found


@pytest.mark.long
def test_rounds_with_seeds(tmp_path: Path) -> None:
    """Whoever begins in the middle has the same examples, and no two rounds are alike."""
    made = rounds(tmp_path, 1, 3)
    assert rounds(tmp_path, 2, 2) == made[1:]
    for one, other in itertools.pairwise(made):
        assert len(one) >= 200 and len({*one} & {*other}) < 20


def test_a_failing_round_prints_how_to_repeat_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    search = Search(60.0, 5, tmp_path / "found")
    rounds_of: list[int] = []

    @fuzzing.fuzz(st.integers(0, 1 << 62), search=search)
    def reader_of_numbers(_: Path, number: int) -> None:
        rounds_of.append(number)
        assert len(rounds_of) <= 250, "it is broken"

    with pytest.raises(AssertionError, match="it is broken"):
        reader_of_numbers(tmp_path)
    output = capsys.readouterr().out
    assert "round 6; again: make fuzz SEED=6 SECONDS=1 PYTEST_ARGS='-k reader_of_numbers'" in output
    assert "it is broken" in (tmp_path / "found" / "reader_of_numbers.txt").read_text()
