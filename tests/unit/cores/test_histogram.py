"""Percentiles against LoadGen's."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpillm.cores.histogram import Histogram
from mpillm.loadgen.logs import quantile


def test_empty() -> None:
    assert Histogram().summary_ms() is None


@given(st.lists(st.floats(1e-5, 1e5), min_size=1, max_size=300), st.integers(1, 5))
def test_percentiles_are_those_of_loadgen_within_a_fraction_of_a_percent(
    seconds: list[float], parts: int
) -> None:
    histogram = Histogram()
    for part in np.array_split(np.array(seconds), parts):
        if len(part) == 1:
            histogram.add_one(part[0].item())
        else:
            histogram.add(part)
    summary = histogram.summary_ms()
    assert summary is not None
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        expected = 1e3 * quantile(np.array(seconds), share)
        assert summary[name] == pytest.approx(expected, rel=0.0021, abs=1e-4)
    assert summary["mean"] == pytest.approx(1e3 * np.mean(seconds), rel=1e-6, abs=1e-4)


def test_what_is_out_of_range_is_counted_at_the_end() -> None:
    histogram = Histogram()
    histogram.add(np.array([0.0, 1e-9, 1e9]))
    summary = histogram.summary_ms()
    assert summary is not None
    assert summary["p50"] == 0
    assert summary["p99"] == pytest.approx(1e9, rel=0.01)


def test_tokens_that_come_at_once_take_no_time() -> None:
    """The percentiles said a microsecond where the mean said 0."""
    histogram = Histogram()
    histogram.add(np.zeros(9))
    assert histogram.summary_ms() == {"p50": 0.0, "p90": 0.0, "p99": 0.0, "mean": 0.0}
    assert histogram.cdf_ms() == {"ms": [0.0], "share": [1.0]}
    histogram.add(np.full(90, 2e-7))
    summary = histogram.summary_ms()
    assert summary is not None and summary["p50"] == pytest.approx(2e-4, rel=0.01)


def test_the_memory_is_constant() -> None:
    histogram = Histogram()
    before = histogram._counts.nbytes
    histogram.add(np.random.default_rng(0).exponential(1, 100_000))
    assert histogram._counts.nbytes == before < 1 << 18


def test_it_keeps_little_however_many_come_together() -> None:
    histogram = Histogram()
    tracemalloc.start()
    for _ in range(300):
        histogram.add(np.full(1024, 0.01))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20, f"{most} bytes"
    assert histogram.summary_ms() is not None
