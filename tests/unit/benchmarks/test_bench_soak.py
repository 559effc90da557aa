"""`benchmarks soak`: what a rank gained, computed from the telemetry of a run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.soak import gain
from disagg.errors import ConfigError


def telemetry(rss: Any) -> dict[str, Any]:
    """Return a test of 100 s at 200 samples per second, in which rank 1 was looked at each second."""
    seconds = np.arange(-5.0, 103.0)
    columns = {"rss_bytes": rss(seconds), "threads": 3 + 0 * seconds, "open_files": 20 + seconds // 60}
    samples = {"seconds": seconds.tolist()} | {name: values.tolist() for name, values in columns.items()}
    progress = {"seconds": [0.0, 50.0, 100.0], "samples": [0, 10_000, 20_000], "tokens": [0, 0, 0]}
    return {"progress": progress, "ranks": {"1": {"samples": samples | {"gpu": {"seconds": []}}}}}


def test_what_grows_with_each_sample_shows_and_one_jump_does_not() -> None:
    found = gain(telemetry(lambda seconds: 5e7 + 16 * 200 * np.maximum(seconds, 0) + 4e5 * (seconds > 95)), 1)
    assert found.looks == 91
    assert (found.bytes_per_sample, found.bytes_per_hour) == pytest.approx((16, 16 * 200 * 3600))
    alone = gain(telemetry(lambda seconds: 5e7 + 4e6 * (seconds > 95)), 1)
    assert (alone.bytes_per_sample, alone.bytes_per_hour) == (0.0, 0.0)
    assert (alone.first_mb, alone.last_mb) == (50.0, 54.0)


def test_threads_and_files_are_counted_from_the_settled_test_to_its_end() -> None:
    found = gain(telemetry(lambda seconds: 5e7 + 0 * seconds), 1)
    assert (found.threads, found.open_files) == (0, 1)


def test_a_test_that_is_too_short_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"rank 2 was looked at 0 times"):
        gain(telemetry(lambda seconds: 5e7 + 0 * seconds), 2)
