"""The regions of a curve of MLPerf Endpoints, its points, and the figures of one."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from disagg.errors import ConfigError
from mpillm.experiments.loadtest.load_test import Record
from mpillm.submission.endpoint_points import Curve, request_logs, result_summary
from mpillm.submission.endpoint_rules import (
    Regions,
    default_points,
    min_duration_s,
    sample_order,
    warm_up_prompts,
)


def test_regions_are_thirds_of_a_logarithm() -> None:
    regions = Regions.of(1024, 16)
    # 16 + 1008 ** (1/3) = 26.03, 16 + 1008 ** (2/3) = 116.5
    assert vars(regions) == {
        "low_latency": 16,
        "low_concurrency": 26,
        "med_concurrency": 117,
        "high_concurrency": 1024,
    }
    assert [regions.region(c) for c in (16, 17, 26, 27, 1025)] == [
        "low_latency",
        "low_concurrency",
        "low_concurrency",
        "med_concurrency",
        None,
    ]
    for c_max, c_min in ((32, 1), (64, 33), (64, 0)):
        with pytest.raises(ConfigError):
            Regions.of(c_max, c_min)


def test_regions_without_a_point_are_named() -> None:
    regions = Regions.of(256, 8)  # 8, 14, 47, 256
    assert regions.uncovered([8, 14, 47, 256]) == []
    assert regions.uncovered([1, 8, 256]) == [
        "no point in low_concurrency (concurrency 9 to 14): a submission needs one",
        "no point in med_concurrency (concurrency 15 to 47): a submission needs one",
    ]


@pytest.mark.parametrize("c_max", [33, 48, 256, 1024, 10_000])
def test_the_points_by_default_lie_in_all_regions(c_max: int) -> None:
    points = default_points(c_max)
    regions = Regions.of(c_max, points[0])
    assert len(points) == 7 and points[-1] == c_max
    assert {regions.region(c) for c in points} == {*vars(regions)}
    scored = regions.accuracy_points(points)
    assert [regions.region(c) for c in scored] == [*vars(regions)] and scored[-1] == c_max
    # With a separate Offline run, the fifth is its own.
    assert regions.accuracy_points(points, offline_run=True)[:3] == scored[:3]


def test_accuracy_results_stay_where_they_are() -> None:
    regions = Regions.of(256, 8)  # 8, 14, 47, 256
    points = [8, 10, 12, 20, 30, 100, 200, 256]
    assert regions.accuracy_points(points) == [8, 10, 20, 256]
    assert regions.accuracy_points(points, offline_run=True) == [8, 10, 20, 100]
    assert regions.accuracy_points(points, scored={12, 30, 200}) == [8, 12, 30, 256]
    assert regions.accuracy_points(points, offline_run=True, scored={12, 30, 200}) == [8, 12, 30, 200]
    # An elected last point counts for Offline, and another one for its region.
    assert regions.accuracy_points(points, scored={200, 256}) == [8, 10, 20, 256]
    for both, offline_run in (({10, 12}, False), ({200, 256}, True), ({100, 200}, False)):
        with pytest.raises(ConfigError, match="have accuracy results in "):
            regions.accuracy_points(points, offline_run, both)


def test_durations() -> None:
    assert [min_duration_s(c) for c in (1, 32, 33)] == [600, 600, 1200]


def test_each_pass_has_all_samples_in_an_order_of_its_own() -> None:
    order = sample_order(50, 7)
    first, second = list(islice(order, 50)), list(islice(order, 50))
    assert sorted(first) == sorted(second) == list(range(50)) and first != second
    assert first == list(islice(sample_order(50, 7), 50))


def test_figures_are_in_nanoseconds_and_leave_out_failures() -> None:
    good = [
        Record(5, start=1.0 + i, ttft=0.1, latency=0.1 + 0.01 * 9, output_len=10, itl=[0.01] * 9)
        for i in range(3)
    ]
    summary = result_summary([*good, Record(5, start=9.0, error="gone")], 2.0, 1.7e9)
    counts = [summary[f"n_samples_{name}"] for name in ("issued", "completed", "failed")]
    assert counts == [4, 3, 1] and summary["duration_ns"] == 2_000_000_000
    assert summary["system_tps"] == 15.0
    assert summary["ttft"]["percentiles"]["90"] == pytest.approx(1e8)
    assert summary["tps_per_user"] == pytest.approx(100.0)
    assert [one["sent"] for one in request_logs(good)] == [0.0, 1.0, 2.0]


def test_answers_of_one_token_have_no_time_per_token() -> None:
    summary = result_summary([Record(5, ttft=0.1, latency=0.1, output_len=1)], 1.0, 1.7e9)
    assert "tps_per_user" not in summary and summary["tpot"] == {"total": 0, "percentiles": {}}


def test_nothing_of_the_data_set_warms_up() -> None:
    """Its lengths and its tokens, in an order that no sample has; the same for a seed."""
    tokens, lengths = np.arange(100, 400, dtype=np.int32), np.array([100, 150, 50])
    made = warm_up_prompts(tokens, lengths, 40, seed=7)
    assert len(made) == 40 and {len(prompt) for prompt in made} == {50, 100, 150}
    assert all(prompt.dtype == np.int32 and {*prompt} <= {*tokens} for prompt in made)
    samples = np.split(tokens, np.cumsum(lengths)[:-1])
    assert not [1 for prompt in made for sample in samples if np.array_equal(prompt, sample)]
    again = warm_up_prompts(tokens, lengths, 40, seed=7)
    assert all(map(np.array_equal, made, again))
    assert not np.array_equal(made[0][:50], warm_up_prompts(tokens, lengths, 1, seed=8)[0][:50])


@pytest.mark.parametrize(
    ("passes", "seconds", "status"),
    [
        (0.9, 3000, "partial_dataset"),
        (3.9, 3000, "insufficient_passes"),
        (4, 599, "insufficient_duration"),
        (4, 600, None),
    ],
)
def test_what_a_point_can_say_of_a_steady_state_by_itself(
    passes: float, seconds: float, status: str | None
) -> None:
    """Whether a point that is long enough has one is for MLCommons' detector to find."""
    nothing = cast(Any, None)
    curve = Curve(Path(), (), "Us", "1", "Box", "RDI", nothing, 48, nothing, nothing, "", 1000, {}, {})
    summary = {"n_samples_issued": round(1000 * passes), "duration_ns": seconds * 1e9}
    block = curve.steady_state(summary, 8)
    assert (block or {}).get("status") == status
