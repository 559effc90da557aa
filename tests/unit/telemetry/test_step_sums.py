"""Sums over steps of about the same size."""

from __future__ import annotations

from mpillm.telemetry.recorder import COLUMNS, StepSums


def test_sums_stay_true_and_few() -> None:
    sums = StepSums()
    for n in range(1, 5000):
        sums.add(0.5, 1, n, 3 * n, n * n, 7)
    found = sums.to_json()
    assert tuple(found) == COLUMNS and len(found["n"]) < 300
    assert sum(found["n"]) == 4999 and sum(found["seconds"]) == 4999 / 2
    assert sum(found["generations"]) == sum(range(5000))
    assert sum(found["generation_pairs"]) == 7 * 4999


def test_small_steps_are_apart() -> None:
    sums = StepSums()
    for n in (1, 2, 2, 15):
        sums.add(1.0, 0, n, 0, 0, 0)
    assert sums.to_json()["generations"] == [1, 4, 15]


def test_short_and_long_answers_are_apart() -> None:
    """Else the steps of one number of sequences are one row, and what their length costs can't be told."""
    sums = StepSums()
    for pairs in (800, 810, 1600):
        sums.add(1.0, 0, 8, 0, 0, pairs)
    found = sums.to_json()
    assert found["n"] == [2, 1] and found["generation_pairs"] == [1610, 1600]
