"""What is said of a test before it starts is what LoadGen then does: each case is run by LoadGen itself, with
answers that take no time."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from mpillm.workloads.early_stopping import SERVER_PERCENTILE, SINGLE_STREAM_PERCENTILE, queries_needed

# Runs the cases of its argument one after another; a case is the fields of `TestSettings`, and the samples of
# the data set.
LOADGEN = """
import json, re, sys, tempfile
from pathlib import Path
import mlperf_loadgen as lg
from mpillm.loadgen.forecast import arrivals, forecast
from mpillm.loadgen.logs import advice, read_detail
from mpillm.loadgen.settings import log_settings

for case in json.loads(sys.argv[1]):
    settings, n = lg.TestSettings(), case.pop("n")
    settings.schedule_rng_seed, settings.server_target_latency_ns = 16159082839903944936, 10**15
    for name, value in case.items():
        kind = {"scenario": lg.TestScenario, "mode": lg.TestMode}.get(name)
        setattr(settings, name, getattr(kind, value) if kind else value)
    told = forecast(settings, n)
    answer = lambda q: lg.QuerySamplesComplete([lg.QuerySampleResponse(s.id, 0, 0) for s in q])
    sut = lg.ConstructSUT(answer, lambda: None)
    qsl = lg.ConstructQSL(n, n, lambda indices: None, lambda indices: None)
    with tempfile.TemporaryDirectory() as folder:
        lg.StartTestWithLogSettings(sut, qsl, settings, log_settings(Path(folder)), "")
        detail, said = read_detail(Path(folder)), advice(Path(folder))
    made = detail["generated_query_count"]
    is_server = settings.scenario == lg.TestScenario.Server
    due = arrivals(settings, 0, made + 1)[made] * 1e9 if is_server else None
    ours = {"lines": told.lines(), "queries": told.queries, "needed": told.needed}
    more = re.findall(r"at least (\\d+) more", " ".join(said))
    theirs = {"detail": detail, "due": due, "more": more}
    print("RESULT", json.dumps(ours | {"obstacles": told.obstacles} | theirs))
"""
SERVER = {
    "n": 160,
    "scenario": "Server",
    "server_target_qps": 5000.0,
    "min_duration_ms": 0,
    "min_query_count": 1,
}
SINGLE = {"n": 160, "scenario": "SingleStream", "min_duration_ms": 0}
OFFLINE = {
    "n": 48,
    "scenario": "Offline",
    "min_query_count": 64,
    "min_duration_ms": 1000,
    "offline_expected_qps": 1000.0,
}
PERMUTED = {"sample_concatenate_permutation": True}
CASES: dict[str, dict[str, Any]] = {
    "server one below p99": {**SERVER, "min_query_count": 458},
    "server at p99": {**SERVER, "min_query_count": 459},
    "server one below p99.9": {
        **SERVER,
        "min_query_count": 4602,
        "server_target_qps": 50_000.0,
        "server_target_latency_percentile": 0.999,
    },
    "server at p99.9": {
        **SERVER,
        "min_query_count": 4603,
        "server_target_qps": 50_000.0,
        "server_target_latency_percentile": 0.999,
    },
    "server one below p97": {**SERVER, "min_query_count": 151, "server_target_latency_percentile": 0.97},
    "server at p97": {**SERVER, "min_query_count": 152, "server_target_latency_percentile": 0.97},
    "server by duration": {**SERVER, "min_duration_ms": 300},
    "server by duration, too short": {**SERVER, "min_duration_ms": 80},
    "server by duration and slowly": {**SERVER, "min_duration_ms": 1000, "server_target_qps": 30.0},
    "server as ten minutes at 10 per second, a thousand times as fast": {
        **SERVER,
        "min_duration_ms": 600,
        "server_target_qps": 10_000.0,
    },
    "server, the data set again and again": {**SERVER, **PERMUTED, "n": 48, "min_query_count": 460},
    "server, the data set again and again by duration": {
        **SERVER,
        **PERMUTED,
        "n": 48,
        "min_duration_ms": 200,
    },
    "server, each sample once": {
        **SERVER,
        "n": 470,
        "performance_issue_unique": True,
        "min_duration_ms": 1000,
    },
    "server ended by max_query_count": {
        **SERVER,
        "min_query_count": 460,
        "max_query_count": 100,
        "min_duration_ms": 200,
    },
    "server ended by max_query_count, but late enough": {
        **SERVER,
        "max_query_count": 800,
        "min_duration_ms": 100,
    },
    "server ended by max_duration": {**SERVER, "min_query_count": 20_000, "max_duration_ms": 2000},
    "single stream one below p90": {**SINGLE, "min_query_count": 63},
    "single stream at p90": {**SINGLE, "min_query_count": 64},
    "single stream one below p99": {
        **SINGLE,
        "min_query_count": 661,
        "single_stream_target_latency_percentile": 0.99,
    },
    "single stream at p99": {
        **SINGLE,
        "min_query_count": 662,
        "single_stream_target_latency_percentile": 0.99,
    },
    "single stream ended by max_query_count": {**SINGLE, "min_query_count": 100, "max_query_count": 50},
    "single stream, each sample once": {
        **SINGLE,
        "n": 50,
        "min_query_count": 100,
        "performance_issue_unique": True,
    },
    "single stream, the data set again and again": {**SINGLE, **PERMUTED, "n": 48, "min_query_count": 48},
    "offline": OFFLINE,
    "offline, the data set again and again": {**OFFLINE, **PERMUTED},
    "offline, each sample once": {**OFFLINE, "performance_issue_unique": True},
    "server, accuracy": {**SERVER, "mode": "AccuracyOnly"},
}
LATE = (1, 5, 40)


def run(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", LOADGEN, json.dumps(cases)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [
        json.loads(line.partition(" ")[2]) for line in done.stdout.splitlines() if line.startswith("RESULT")
    ]


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    return dict(zip(CASES, run(list(CASES.values())), strict=True))


@pytest.mark.parametrize(
    "name", [name for name in CASES if not name.startswith("offline") and "accuracy" not in name]
)
def test_queries_and_verdict(name: str, results: dict[str, dict[str, Any]]) -> None:
    """The number of queries is exact.

    A test has obstacles if and only if LoadGen calls it INVALID, as nothing else is wrong with it.
    """
    result, detail = results[name], results[name]["detail"]
    if "max_duration" not in name:  # which ends a test by the clock, not by the schedule
        assert result["queries"] == detail["result_query_count"]
    assert detail["result_validity"] == ("INVALID" if result["obstacles"] else "VALID"), result["lines"]
    text = " ".join(result["lines"])
    assert ("early stopping needs" in text and "too few" in text) == (not detail["early_stopping_met"])
    assert ("before min_query_count" in text) == (not detail["result_min_queries_met"])
    assert ("before min_duration" in text) == (not detail["result_min_duration_met"])
    assert len(result["lines"]) == (2 if result["obstacles"] else 1)
    # to the nanosecond: LoadGen logs when the query after the last would have been due
    if result["due"] is not None:
        assert round(result["due"]) == detail["generated_query_duration"]


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("offline")])
def test_offline(name: str, results: dict[str, dict[str, Any]]) -> None:
    assert results[name]["queries"] == results[name]["detail"]["generated_samples_per_query"]
    assert "VALID if they take 1 s or more (min_duration), which is at most" in results[name]["lines"][0]


def test_accuracy(results: dict[str, dict[str, Any]]) -> None:
    result = results["server, accuracy"]
    assert result["queries"] == result["detail"]["generated_query_count"] == 160 and result["needed"] is None
    assert result["lines"] == ["Server: every sample once, 160 queries at 5000 per second take about 0.0 s"]


def test_late_queries() -> None:
    """LoadGen says how many more queries it wants when all of them were late."""
    all_late = [{**SERVER, "min_query_count": late, "server_target_latency_ns": 0} for late in LATE]
    for late, result in zip(LATE, run(all_late), strict=True):
        assert [late + int(more) for more in result["more"]] == [queries_needed(SERVER_PERCENTILE, late)]


def test_needed() -> None:
    assert (queries_needed(SERVER_PERCENTILE), queries_needed(SINGLE_STREAM_PERCENTILE, late=1)) == (459, 64)
    assert (queries_needed(0.0), queries_needed(1.0)) == (1, None)


def test_lines() -> None:
    """The forecast is readable for a full workload, a test of ten minutes, and one that is too short."""
    slow = {
        **SERVER,
        **PERMUTED,
        "n": 24576,
        "server_target_qps": 1.0,
        "min_query_count": 100,
        "min_duration_ms": 600_000,
    }
    ten = {**SERVER, "server_target_qps": 10.0, "min_duration_ms": 600_000}
    short = {**SERVER, "server_target_qps": 0.5, "min_duration_ms": 600_000}
    single = {
        **SINGLE,
        "min_query_count": 160,
        "min_duration_ms": 600_000,
        "single_stream_expected_latency_ns": 10_000_000,
    }
    never = {**SERVER, "server_target_latency_percentile": 1.0}
    script = LOADGEN.partition("    sut =")[0] + "    print('RESULT', json.dumps(told.lines()))\n"
    cases = [json.dumps([slow, ten, short, single, never])]
    done = subprocess.run(
        [sys.executable, "-c", script, *cases], capture_output=True, text=True, timeout=300, check=True
    )
    assert [json.loads(line.partition(" ")[2]) for line in done.stdout.splitlines()] == [
        ["Server: 24,576 queries at 1 per second take 6.8 h; early stopping needs 459 at p99: enough"],
        ["Server: 6,012 queries at 10 per second take 600 s; early stopping needs 459 at p99: enough"],
        [
            "Server: 298 queries at 0.5 per second take 606 s; early stopping needs 459 at p99: too few",
            "this test can't become VALID: early stopping needs 459 queries at p99, and the test has 298:"
            " give --min_query_count 459 or more",
        ],
        [
            "SingleStream: 160 queries or more, one after the other, for 600 s (VALID if a query takes 5 ms"
            " or more); early stopping needs 64 at p90: enough"
        ],
        [
            "Server: 1 queries at 5000 per second take 0.0 s",
            "this test can't become VALID: no number of queries satisfies early stopping at p100; lower"
            " target_latency_percentile",
        ],
    ]
