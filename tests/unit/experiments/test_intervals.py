"""Confidence intervals hold what they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mpillm.experiments.commands.ab import verdict_text
from mpillm.experiments.intervals import (
    MAX_PAIRS,
    Estimate,
    by_blocks,
    difference,
    paired_test,
    pairs_needed,
    per_second,
    t_cdf,
    t_quantile,
)

VALUE = np.dtype([("x", "f8")])


@pytest.mark.parametrize(
    ("probability", "df", "quantile"),  # from published tables
    [
        (0.975, 1, 12.706205),
        (0.975, 4, 2.776445),
        (0.995, 4, 4.604095),
        (0.975, 19, 2.093024),
        (0.025, 9, -2.262157),
        (0.975, 1e6, 1.959966),
    ],
)
def test_students_quantiles(probability: float, df: float, quantile: float) -> None:
    assert t_quantile(probability, df) == pytest.approx(quantile, rel=1e-6)
    assert t_cdf(quantile, df) == pytest.approx(probability, rel=1e-6)


def test_blocks_cover_the_mean_of_correlated_values_where_plain_errors_do_not() -> None:
    """Neighbours in a queue wait alike: an AR(1) series, whose mean is 0."""
    rng = np.random.default_rng(1)
    rounds, n, inside, plain = 200, 4000, 0, 0
    for _ in range(rounds):
        noise = rng.normal(size=n)
        series = np.empty(n)
        level = 0.0
        for i in range(n):
            series[i] = level = 0.9 * level + noise[i]
        rows = series.view(VALUE)
        found = by_blocks(rows, lambda part: float(part["x"].mean()))
        inside += abs(found.value) < found.half_width(0.95)
        plain += abs(found.value) < 1.96 * series.std() / math.sqrt(n)
    assert inside >= 0.88 * rounds
    assert plain < 0.6 * rounds


def test_too_few_requests_have_no_interval() -> None:
    found = by_blocks(np.arange(50.0).view(VALUE), lambda part: float(part["x"].mean()))
    assert found.value == 24.5 and math.isnan(found.half_width())


def test_a_rate_of_answers_that_end_in_batches_is_known() -> None:
    """Two instances of 16 places, 10 batches each: 0.5 s a batch, whose speed varies by a tenth."""
    rng = np.random.default_rng(4)
    rounds, inside, reach = 200, 0, []
    for _ in range(rounds):
        ends = np.cumsum(0.5 * (1 + 0.1 * rng.standard_normal((2, 10))), axis=1)
        ended = np.repeat(ends.ravel(), 16)
        begun = np.repeat(np.hstack([np.zeros((2, 1)), ends[:, :-1]]).ravel(), 16)
        found = per_second(begun, ended, np.full(320, 64.0), 0.0)
        inside += abs(found.value - 32 * 64 / 0.5) < found.half_width(0.95)
        reach.append(found.half_width() / found.value)
    assert inside >= 0.88 * rounds
    assert np.median(reach) < 0.12
    few = per_second(np.zeros(49), np.ones(49), np.ones(49), 0.0)
    assert few.value == 49.0 and math.isnan(few.half_width())
    assert math.isnan(per_second(np.empty(0), np.empty(0), np.empty(0), math.inf).value)


def test_the_difference_of_runs_is_as_uncertain_as_both() -> None:
    found = difference(Estimate(10.0, 3.0, 19), Estimate(12.0, 4.0, 19))
    assert (found.value, found.error) == (2.0, 5.0)
    assert 19 < found.df < 38


def test_pairs_without_a_difference_are_seldom_called_different() -> None:
    rng = np.random.default_rng(2)
    real = [
        paired_test(rng.lognormal(0, 0.02, 5).tolist(), rng.lognormal(0, 0.02, 5).tolist(), 0.01).real
        for _ in range(500)
    ]
    assert sum(real) <= 15  # 5 expected


def test_a_difference_that_stands_out_of_the_noise_is_found() -> None:
    rng = np.random.default_rng(3)
    found = [
        paired_test(rng.lognormal(0, 0.004, 5).tolist(), rng.lognormal(0.03, 0.004, 5).tolist(), 0.01)
        for _ in range(200)
    ]
    assert sum(one.real for one in found) >= 190
    assert sum(one.low < math.exp(0.03) < one.high for one in found) >= 190


def test_values_that_are_alike_to_the_last_digit() -> None:
    same = paired_test([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], 0.01)
    assert (same.real, same.p, same.ratio) == (False, 1.0, 1.0)


def test_an_uncertain_comparison_does_not_show_equality() -> None:
    """These three pairs do not show that the runs are the same: one has 9.6 times the other's rate."""
    text = verdict_text(paired_test([20.284, 36.234, 19.594], [194.71, 81.286, 59.894], 0.01), 3)
    assert text.startswith("no difference shown (99 % interval of the change: -94.98 to +32,393.74 %)")
    assert "\nratio B/A 4.0377 (99 % interval: 0.0502 to " in text


@pytest.mark.parametrize("n", [3, 5])
def test_the_pairs_that_are_suggested_decide(n: int) -> None:
    """Pairs like those seen, as many as suggested, but one fewer do not."""
    rng = np.random.default_rng(n)
    logs = rng.normal(0, 1, n)
    logs = 0.01 + 0.01 * (logs - logs.mean()) / logs.std(ddof=1)
    seen = paired_test([1.0] * n, np.exp(logs).tolist(), 0.01)
    needed = pairs_needed(seen, n)
    assert not seen.real and needed is not None and needed > n
    assert f"\nundecided: if further pairs are like these, --pairs {needed} decides" in verdict_text(seen, n)
    scores = rng.normal(0, 1, MAX_PAIRS)

    def real(more: int) -> bool:
        own = scores[:more] - scores[:more].mean()
        own *= logs.std(ddof=1) / own.std(ddof=1)
        return paired_test([1.0] * more, np.exp(own + 0.01).tolist(), 0.01).real

    assert real(needed) and not real(needed - 1)


def test_pairs_without_a_difference_are_never_enough() -> None:
    seen = paired_test([1.0, 1.0, 1.0, 1.0], [1.01, 0.99, 1.02, 0.98], 0.01)
    assert pairs_needed(seen, 4) is None
    assert f"even --pairs {MAX_PAIRS} does not decide" in verdict_text(seen, 4)
