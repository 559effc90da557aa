"""What others used of the CPUs, and measuring again because of it."""

from __future__ import annotations

import pytest

from mpillm.telemetry.other_load import Disturbance, OtherLoad, measure_undisturbed


@pytest.mark.parametrize(
    ("used", "expected"),
    [
        (Disturbance(0.05, 0.01), ""),
        (Disturbance(0.5, 0.0), "; disturbed: other processes used 0.5 cores"),
        (Disturbance(0.0, 0.2), "; disturbed: the host took 0.20 cores"),
        (Disturbance(1.0, 0.2), "; disturbed: other processes used 1.0 cores, the host took 0.20 cores"),
    ],
)
def test_disturbances_are_named(used: Disturbance, expected: str) -> None:
    assert used.note() == expected
    assert (used.degree > 1) == bool(expected)


def test_what_the_host_takes_for_minutes_is_not_waited_out() -> None:
    now, taken = [0.0], [0.0]

    def measure(stolen: float) -> float:
        now[0] += 10.0
        taken[0] += 10 * stolen
        return now[0]

    found, others = measure_undisturbed(
        lambda: measure(0.5), lambda: OtherLoad(lambda: (now[0], 0.0, taken[0]))
    )
    assert found == 10.0 and others.note() == "; disturbed: the host took 0.50 cores"


@pytest.mark.parametrize(
    ("others_s", "kept"),
    [
        ([0.0], 0),  # at once undisturbed
        ([5.0, 0.0], 1),
        ([5.0, 2.0, 9.0], 1),  # never: the least
        ([2.0, 5.0, 9.0, 0.0], 0),  # no fourth time
    ],
)
def test_the_least_disturbed_is_kept(others_s: list[float], kept: int) -> None:
    now, used = [0.0], [0.0]
    measured: list[int] = []

    def measure() -> int:
        measured.append(len(measured))
        now[0] += 10.0
        used[0] += others_s[measured[-1]]
        return measured[-1]

    found, others = measure_undisturbed(measure, lambda: OtherLoad(lambda: (now[0], used[0], 0.0)))
    assert (found, others.processes) == (kept, others_s[kept] / 10.0)
    assert len(measured) == min(3, len(others_s))
