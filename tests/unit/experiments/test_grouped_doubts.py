"""The doubts of several runs: one line for each kind."""

from __future__ import annotations

from mpillm.experiments.grouped_doubts import grouped_doubts

BUSY = "disturbed: in the test other processes used {} of the 2 cores of vm"


def test_runs_share_the_line_of_a_doubt_that_differs_in_numbers_only() -> None:
    doubts = [(f"run {i}", BUSY.format(i / 10)) for i in range(6)] + [("run 3", "the queue grew")]
    assert grouped_doubts(doubts) == [
        f"6 runs (run 0, run 1, run 2, run 3 and 2 more): for example, {BUSY.format(0.0)}",
        "run 3: the queue grew",
    ]


def test_equal_doubts_are_no_example() -> None:
    assert grouped_doubts([("A", "late"), ("B", "late")]) == ["2 runs (A, B): late"]
    assert grouped_doubts([]) == []
