"""What limits a rate, from the processor time of server and clients."""

from __future__ import annotations

import pytest

from benchmarks.busy import Busy, cores, median
from mpillm.runtime.whole_runs import rank_cores


@pytest.mark.parametrize(
    ("busy", "expected"),
    [
        (Busy(1.0, 0.5, 0.8, 0.8), "the machine: server and clients use 1.80 of 2 cores"),
        (Busy(1.0, 0.9, 0.1, 0.1), "the server: one of its threads uses 0.90 of a core"),
        (Busy(0.3, 0.3, 1.0, 0.95), "the clients: a process uses 0.95 of a core"),
        (Busy(0.4, 0.3, 0.2, 0.1, 0.9), "the server: its model's instances have requests 90 % of the time"),
        (
            Busy(0.4, 0.3, 0.2, 0.1, 0.5),
            "waits: .* uses 0.30, a client 0.10; .* have requests 50 % of",
        ),
    ],
)
def test_the_limit(busy: Busy, expected: str) -> None:
    first, *rest = expected.split(" .* ")
    assert busy.limit(2).startswith(first) and all(part in busy.limit(2) for part in rest)


def test_cores_of_threads_old_and_new() -> None:
    together, busiest = cores({1: 10.0, 2: 4.0}, {1: 11.0, 2: 4.5, 3: 1.5}, 2.0)
    assert (together, busiest) == (1.5, 0.75)
    assert median([Busy(1, 1, 1, 1), Busy(3, 2, 3, 5), Busy(2, 9, 0, 2)]) == Busy(2, 2, 1, 2)


def test_ranks_count_in_the_test_only() -> None:
    samples = {"seconds": [-1.0, 0.5, 1.0, 2.5, 3.5], "cpu_s": [0.0, 5.0, 5.5, 6.5, 9.0]}
    rank = {"phases": [["load", -2.0, -1.0], ["test", 0.0, 3.0]], "samples": samples}
    short = {"phases": [["test", 0.0, 0.2]], "samples": samples}
    assert rank_cores({"ranks": {"0": rank, "1": short}}) == [0.75, 0.0]
