"""Prediction of the samples that LoadGen issues in a test, and of their times. LoadGen uses fixed seeds."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import mlperf_loadgen as lg
import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError
from mpillm.loadgen.forecast import arrivals
from mpillm.loadgen.settings import LoadGenSettings, log_settings

_FAST_QPS = 1e6  # LoadGen draws the same samples at any rate


class IssueOrder(NamedTuple):
    """The samples of a test, in the order of their issue."""

    indices: NDArray[np.int64]  # in the data set
    at: NDArray[np.float64]  # seconds from the test's start


def issue_order(settings: LoadGenSettings, n_samples: int) -> IssueOrder:
    """Return the samples and times of an Offline or Server test; `n_samples`: size of the data set.

    A LoadGen test without duration provides the samples. Raises ConfigError for other scenarios, or for too
    many queries.
    """
    test, n = settings.test, settings.forecast.queries
    if test.scenario not in (lg.TestScenario.Offline, lg.TestScenario.Server) or n is None:
        raise ConfigError(
            f"{test.scenario.name}: the issued samples depend on the answers; only Offline and Server can be"
            " predicted",
            about=["scenarios"],
        )
    at = np.zeros(n)
    if test.scenario == lg.TestScenario.Server:
        at = arrivals(test, 0.0, n)[:n]
        if not len(at):
            raise ConfigError(
                f"{n:,} queries are too many to simulate: lower --min_query_count, --min_duration"
            )
    return IssueOrder(_samples(test, n, n_samples), at)


def _samples(test: Any, n: int, n_samples: int) -> NDArray[np.int64]:
    """Return the samples of the first `n` queries, from a test with the same seeds and no duration."""
    short = lg.TestSettings()
    short.scenario, short.mode, short.server_target_qps = test.scenario, test.mode, _FAST_QPS
    for name in (
        *("qsl_rng_seed", "sample_index_rng_seed", "schedule_rng_seed", "performance_sample_count_override"),
        *("accuracy_sample_count_override", "performance_issue_unique", "sample_concatenate_permutation"),
    ):
        setattr(short, name, getattr(test, name))
    short.min_query_count, short.min_duration_ms = n, 0
    issued: list[NDArray[np.int64]] = []

    def issue(samples: list[Any]) -> None:
        issued.append(np.fromiter((sample.index for sample in samples), np.int64, len(samples)))
        lg.QuerySamplesComplete([lg.QuerySampleResponse(sample.id, 0, 0) for sample in samples])

    sut = lg.ConstructSUT(issue, lambda: None)
    qsl = lg.ConstructQSL(n_samples, n_samples, lambda indices: None, lambda indices: None)
    with tempfile.TemporaryDirectory(prefix="mpillm-loadgen-") as folder:
        lg.StartTestWithLogSettings(sut, qsl, short, log_settings(Path(folder)), "")
    lg.DestroyQSL(qsl)
    lg.DestroySUT(sut)
    return np.concatenate(issued)[:n]
