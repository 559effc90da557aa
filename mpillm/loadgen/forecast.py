"""Forecast of a test: the number of queries, its duration, and whether the queries are enough.

The arithmetic is from LoadGen 6.0 (mlcommons/inference, loadgen/): loadgen.cc for the issued queries,
results.cc for the verdict. Latencies are unknown before the test, so "enough" assumes that none exceeds its
limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlperf_loadgen as lg
import numpy as np
from numpy.typing import NDArray

from mpillm.workloads.early_stopping import queries_needed

_MAX_SIMULATED = (
    10_000_000  # beyond it, the mean rate is accurate to 0.01 %, and the simulation takes seconds
)
_OFFLINE_SLACK = 1.1  # LoadGen's factor on the expected samples of the one query
_SINGLE_STREAM_SLACK = 2  # LoadGen's factor on the expected queries


@dataclass(frozen=True)
class Forecast:
    """Forecast of a test. `line` and `obstacles` are text to print.

    An obstacle is a reason why the test cannot become VALID, with the remedy.
    """

    line: str
    queries: int | None = None  # Offline: samples; None: the system's speed determines it
    needed: int | None = None  # queries that early stopping needs; None: no early stopping
    obstacles: Sequence[str] = ()
    seconds: float | None = None  # time of the last query, or of the earliest end; None: unknown

    def to_json(self) -> dict[str, Any]:
        """Return the entries for result.json."""
        return {"expected_queries": self.queries, "early_stopping_queries": self.needed}

    def lines(self) -> list[str]:
        """Return the lines to print."""
        return [self.line] + (
            [f"this test can't become VALID: {'; '.join(self.obstacles)}"] if self.obstacles else []
        )


def forecast(settings: Any, n_samples: int) -> Forecast:
    """Forecast the test that LoadGen's `TestSettings` describe, with a data set of `n_samples`."""
    if settings.scenario == lg.TestScenario.Server:
        return (
            _accuracy_server(settings, n_samples)
            if settings.mode == lg.TestMode.AccuracyOnly
            else _server(settings, n_samples)
        )
    if settings.mode == lg.TestMode.AccuracyOnly:
        return Forecast(
            f"{settings.scenario.name}: every sample once, {_accuracy_samples(settings, n_samples):,} samples"
        )
    return (_offline if settings.scenario == lg.TestScenario.Offline else _single_stream)(settings, n_samples)


def _server(settings: Any, n_samples: int) -> Forecast:
    rate, loaded = settings.server_target_qps, settings.performance_sample_count_override or n_samples
    min_queries, min_duration_s, limits = settings.min_query_count, settings.min_duration_ms / 1000, []
    if settings.performance_issue_unique:
        min_queries, min_duration_s, limits = loaded, 0.0, [f"performance_issue_unique ({loaded:,} samples)"]
    times = arrivals(settings, max(min_duration_s, settings.max_duration_ms / 1000), min_queries)
    queries = max(min_queries, 1 + _before(times, min_duration_s, rate) if min_duration_s else 1)
    if settings.sample_concatenate_permutation:  # whole passes over the data set
        queries = math.ceil(queries / loaded) * loaded
    if 0 < settings.max_query_count < queries:
        queries = settings.max_query_count
        limits.append(f"max_query_count ({queries:,})")
    if (
        settings.max_duration_ms
        and (max_queries := 1 + _before(times, settings.max_duration_ms / 1000, rate)) < queries
    ):
        queries = max_queries
        limits.append(f"max_duration ({settings.max_duration_ms / 1000:g} s)")
    seconds = float(times[queries - 1]) if queries <= len(times) else (queries - 1) / rate
    needed = queries_needed(settings.server_target_latency_percentile)
    line = f"Server: {queries:,} queries at {rate:g} per second take {_duration(seconds)}"
    return _with_verdict(
        settings, line, queries, needed, settings.server_target_latency_percentile, seconds, limits
    )


def _accuracy_server(settings: Any, n_samples: int) -> Forecast:
    queries, rate = _accuracy_samples(settings, n_samples), settings.server_target_qps
    line = f"Server: every sample once, {queries:,} queries at {rate:g} per second"
    return Forecast(f"{line} take about {_duration(queries / rate)}", queries, seconds=queries / rate)


def _accuracy_samples(settings: Any, n_samples: int) -> int:
    return int(settings.accuracy_sample_count_override or n_samples)


def _offline(settings: Any, n_samples: int) -> Forecast:
    loaded = settings.performance_sample_count_override or n_samples
    min_duration_s = settings.min_duration_ms / 1000
    samples = max(
        settings.min_query_count, int(_OFFLINE_SLACK * min_duration_s * settings.offline_expected_qps)
    )
    if settings.performance_issue_unique:
        samples = loaded
    if settings.sample_concatenate_permutation:
        samples = math.ceil(samples / loaded) * loaded
    line = f"Offline: {samples:,} samples in one query"
    if min_duration_s:
        line += (
            f"; VALID if they take {min_duration_s:g} s or more (min_duration),"
            f" which is at most {samples / min_duration_s:,.1f} samples/s."
            " A higher --offline_expected_qps makes the query larger"
        )
    return Forecast(line, samples)


def _single_stream(settings: Any, n_samples: int) -> Forecast:
    loaded = settings.performance_sample_count_override or n_samples
    min_queries, min_duration_s = settings.min_query_count, settings.min_duration_ms / 1000
    expected_s = settings.single_stream_expected_latency_ns / 1e9
    if settings.sample_concatenate_permutation:
        min_queries = max(min_queries, int(_SINGLE_STREAM_SLACK * min_duration_s / expected_s))
        min_queries += n_samples - min_queries % n_samples
    n_expected = max(
        min_queries,
        math.ceil(_SINGLE_STREAM_SLACK * min_duration_s / expected_s) + 1 if min_duration_s else 1,
    )
    queries = None if min_duration_s else min_queries
    limits = []
    for name, max_queries in (
        ("max_query_count", settings.max_query_count),
        ("performance_issue_unique", loaded if settings.performance_issue_unique else 0),
    ):
        if max_queries and (queries is None or max_queries < queries):
            queries = max_queries
            limits.append(f"{name} ({max_queries:,})")
    percentile = settings.single_stream_target_latency_percentile
    needed = queries_needed(percentile, late=1)
    line = (
        f"SingleStream: {min_queries:,} queries or more"
        if queries is None
        else f"SingleStream: {queries:,} queries"
    )
    line += ", one after the other"
    if min_duration_s:
        query_ms = 1000 * min_duration_s / n_expected
        line += f", for {min_duration_s:g} s (VALID if a query takes {query_ms:.3g} ms or more)"
    result = _with_verdict(settings, line, queries, needed, percentile, None, limits)
    return replace(result, seconds=min_duration_s or None) if queries is None else result


def _with_verdict(
    settings: Any,
    line: str,
    queries: int | None,
    needed: int | None,
    percentile: float,
    seconds: float | None,
    limits: Sequence[str],
) -> Forecast:
    """Compare the queries with early stopping and the minima.

    `limits`: settings that end the test early. `seconds`: time of the last query, if known.
    """
    at = f"p{100 * percentile:g}"
    if needed is None:
        never = f"no number of queries satisfies early stopping at {at}; lower target_latency_percentile"
        return Forecast(line, queries, None, [never], seconds)
    obstacles = []
    enough = queries is None or queries >= needed
    if not enough:
        remedy = (
            f"change {limits[-1].split()[0]} in the user.conf"
            if limits
            else f"give --min_query_count {needed} or more"
        )
        obstacles.append(
            f"early stopping needs {needed:,} queries at {at}, and the test has {queries:,}: {remedy}"
        )
    if limits and queries is not None and queries < settings.min_query_count:
        obstacles.append(f"{limits[-1]} ends the test before min_query_count ({settings.min_query_count:,})")
    if limits and seconds is not None and seconds < settings.min_duration_ms / 1000:
        obstacles.append(
            f"{limits[-1]} ends the test before min_duration ({settings.min_duration_ms / 1000:g} s)"
        )
    line = f"{line}; early stopping needs {needed:,} at {at}: {'enough' if enough else 'too few'}"
    return Forecast(line, queries, needed, obstacles, seconds)


def arrivals(settings: Any, seconds: float, queries: int) -> NDArray[np.float64]:
    """Return the times, in seconds (float64), at which LoadGen issues the queries of a Server test.

    The result covers `seconds`, and at least `queries`. It is empty if these are too many to simulate.
    Arrivals are a Poisson process with the round's seed. LoadGen draws them with libstdc++'s mt19937 and
    exponential_distribution, in whole nanoseconds.
    """
    rate = settings.server_target_qps
    mean = seconds * rate
    count = max(math.ceil(mean + 10 * math.sqrt(mean)), queries) + 100
    if count > _MAX_SIMULATED:
        return np.empty(0)
    draws = np.random.RandomState(settings.schedule_rng_seed & 0xFFFFFFFF).randint(
        0, 1 << 32, (count, 2), np.uint32
    )
    uniform = (draws[:, 0] + draws[:, 1] * 2.0**32) / 2.0**64
    gaps = (-np.log(1 - uniform) / rate * 1e9).astype(np.int64)
    return np.concatenate(([0], np.cumsum(gaps[:-1]))) / 1e9


def _before(times: NDArray[np.float64], seconds: float, rate: float) -> int:
    """Return the number of queries before `seconds`."""
    return int(np.searchsorted(times, seconds)) if len(times) else round(seconds * rate)


def _duration(seconds: float) -> str:
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds:,.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
