"""What `advise` fits: times of steps by what they hold, slower beside others, and lines through points."""

from __future__ import annotations

import numpy as np
import pytest

from mpillm.experiments.advise.step_times import (
    FEATURES,
    CoreSharing,
    LinearTime,
    StepTimes,
    fit,
    shared,
    slowdown,
)
from mpillm.telemetry.recorder import StepSums

TRUE = StepTimes((0, 1, 64), (5e-3, 5e-3, 25e-3), (1e-3, 2e-4, 1e-8, 1e-6))


def measured(factor: float = 1.0, noise: float = 0.0) -> dict[str, list[float]]:
    sums, draw = StepSums(), np.random.default_rng(1)
    for _ in range(400):
        n = int(draw.integers(1, 64))
        contexts = int(draw.integers(0, 3))
        tokens = contexts * int(draw.integers(20, 400))
        pairs, seen = tokens * 200, n * int(draw.integers(10, 900))
        seconds = factor * TRUE.seconds((n, contexts, tokens, pairs, seen))
        sums.add(seconds * (1 + noise * draw.standard_normal()), contexts, n, tokens, pairs, seen)
    return sums.to_json()


def test_a_linear_cost_is_found_from_sums_of_steps() -> None:
    """A bin's mean is on the line, however wide it is."""
    found = fit([measured()])
    for held in ((1, 0, 0, 0, 50), (63, 0, 0, 0, 30_000), (32, 2, 500, 100_000, 9000)):
        assert found.seconds(held) == pytest.approx(TRUE.seconds(held), rel=1e-3)


def test_no_part_of_a_step_takes_less_than_no_time() -> None:
    found = fit([measured(noise=0.3)])
    assert min(*found.at_nodes, *found.slopes) >= 0
    assert found.seconds((32, 1, 200, 40_000, 9000)) == pytest.approx(
        TRUE.seconds((32, 1, 200, 40_000, 9000)), rel=0.2
    )


def test_what_no_step_held_costs_nothing() -> None:
    sums = StepSums()
    for n in range(1, 9):
        sums.add(0.01 + 0.001 * n, 0, n, 0, 0, 0)
    found = fit([sums.to_json()])
    assert found.seconds((4, 0, 0, 0, 0)) == pytest.approx(0.014)
    assert found.slopes == (0, 0, 0, 0)
    assert len(found.slopes) == len(FEATURES)


def test_batches_need_not_take_longer_in_proportion() -> None:
    """Products of 4 to 16 rows as long as each other, and twice as long as those of one row."""
    sums = StepSums()
    for n, seconds in ((1, 0.02), (4, 0.04), (16, 0.04)):
        for _ in range(100):
            sums.add(seconds, 0, n, 0, 0, n * 64)
    found = fit([sums.to_json()])
    assert found.nodes == (1, 4, 16)
    for n, seconds in ((1, 0.02), (2, 0.02 + 0.02 / 3), (4, 0.04), (10, 0.04), (16, 0.04)):
        assert found.seconds((n, 0, 0, 0, n * 64)) == pytest.approx(seconds, rel=1e-3)


def test_what_length_costs_is_found_from_one_number_of_sequences() -> None:
    """Between one request at a time and a batch, both answers' lengths and their number differ."""
    sums = StepSums()
    for n in (1, 8):
        for i in range(128):
            pairs = n * (100 + i)
            sums.add(0.002 + 1e-6 * pairs, 0, n, 0, 0, pairs)
    found = fit([sums.to_json()])
    assert found.seconds((8, 0, 0, 0, 8 * 500)) == pytest.approx(0.006, rel=1e-3)


def test_one_size_alone_is_level() -> None:
    sums = StepSums()
    sums.add(0.02, 0, 8, 0, 0, 0)
    assert [fit([sums.to_json()]).seconds((n, 0, 0, 0, 0)) for n in (1, 8, 9)] == pytest.approx([0.02] * 3)


def test_steps_beside_others_take_so_many_times_as_long() -> None:
    assert slowdown(TRUE, [measured(1.7)]) == pytest.approx(1.7)
    times, sharing = shared(TRUE, 2, [measured(1.7)])
    assert times == TRUE and sharing.slowdown(2, 1) == pytest.approx(1.7)


def test_ranks_that_seem_faster_beside_others_were_slower_alone() -> None:
    """What all at once were measured to take is what they are predicted to take."""
    times, sharing = shared(TRUE, 2, [measured(0.9)])
    held = (32, 1, 200, 40_000, 9000)
    assert sharing.slowdown(2, 1) == 1.0
    assert times.seconds(held) == pytest.approx(0.9 * TRUE.seconds(held))


def test_sharing_grows_with_each_rank_that_computes() -> None:
    sharing = CoreSharing(4, 2.5)
    assert [sharing.slowdown(busy, 1) for busy in (1, 2, 4)] == [1.0, 1.5, 2.5]
    assert sharing.slowdown(4, 4) == 1.0  # an instance of all ranks was measured so
    assert CoreSharing().slowdown(3, 1) == 1.0


def test_a_line_ignores_a_disturbed_point() -> None:
    tokens = [10.0, 20.0, 40.0, 80.0, 100.0]
    seconds = [0.1 + 0.002 * n for n in tokens]
    seconds[1] = 9.0
    assert LinearTime.through(tokens, seconds) == LinearTime(pytest.approx(0.1), pytest.approx(0.002))  # type: ignore[arg-type]
    assert LinearTime.through([5.0, 5.0], [0.3, 0.3]) == LinearTime(0.3)
    assert LinearTime.through([1.0, 2.0], [-0.1, -0.2]) == LinearTime(0.0)
