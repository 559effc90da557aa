"""Tests of conversations at a rate: their options, their verdict, and when they are stopped."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpillm.experiments.conversation_rate_tests import ConversationRateTests
from mpillm.experiments.rate_search import find_max_rate
from mpillm.options.options import parse_run
from mpillm.report.request_log import RECORD
from mpillm.runtime.whole_runs import EndedRun
from tests.helpers.run_directories import write_rows

WORDS = [
    *("--scenarios=Server", "--core_type=dummy", "--goodput", "ttft:500"),
    *("--harness=conversations", "--dataset_path=talks.jsonl"),
]


def result_of(late: int, rate: float, **more: Any) -> dict[str, Any]:
    turns = {"ttft_ms": {"mean": 5.0, "p90": None}, "cached_share": None}
    return {
        "status": "MEASURED",
        "samples_per_second": 3 * rate,
        "tokens_per_second": 30 * rate,
        "test_s": 10.0,
        "ttft_ms": {"p99": 400.0},
        "tpot_ms": None,
        "errors": 0,
        "doubts": [],
        "conversations": {"ended": round(10 * rate), "first_turns": turns, "later_turns": turns},
        "goodput": {"limits_ms": {"ttft": 500.0}, "late": {"ttft": late}, "late_allowed": 2}
        | {"good_conversations_share": 0.5},
        **more,
    }


class FakeRuns:
    """Runs of a system with too many late requests above a rate."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.options: list[dict[str, str]] = []
        self.args: list[list[str]] = []

    def __call__(
        self, folder: Path, mpirun: list[str], options: list[str], watch: Callable[[], str]
    ) -> EndedRun:
        self.args.append(options)
        self.options.append(dict(zip(options[-4::2], options[-3::2], strict=True)))
        folder.mkdir(parents=True)
        rate = float(self.options[-1]["--server_target_qps"])
        return EndedRun(folder, 0, result_of(3 if rate > self.limit else 2, rate))


def search_in(folder: Path, run_in: Any, *more: str) -> ConversationRateTests:
    config = parse_run([*WORDS, *more], command="find-max-qps")
    return ConversationRateTests(folder, ["-n", "2"], ["--a", *more], config, probe_s=5.0, run_in=run_in)


def test_the_search_finds_the_highest_rate_within_the_limits(tmp_path: Path) -> None:
    runs = FakeRuns(limit=11.0)
    tests = search_in(tmp_path, runs, "--min_duration", "40")
    assert tests.start is not None
    found = find_max_rate(tests.test, tests.start, 0.1)
    assert found.best.rate <= 11 < found.too_high <= 1.101 * found.best.rate
    assert runs.options[0] == {"--server_target_qps": "1", "--num_conversations": "16"}
    assert all(args[:-4] == ["--a"] for args in runs.args), "a run of conversations has no min_duration"
    last = runs.options[-1]
    assert int(last["--num_conversations"]) == round(40 * float(last["--server_target_qps"]))
    assert found.best.figures["good_conversations_share"] == 0.5
    assert found.best.figures["ttft_p99_ms"] == 400.0 and "cached_share" not in found.best.figures


@pytest.mark.parametrize(
    ("late", "more", "why"),
    [
        (2, {}, ""),
        (3, {}, "3 requests exceeded ttft 500 ms, 2 are allowed"),
        (0, {"errors": 4}, "4 answers were errors"),
    ],
)
def test_limits_and_errors_decide(tmp_path: Path, late: int, more: dict[str, Any], why: str) -> None:
    def run_in(folder: Path, *_: Any) -> EndedRun:
        return EndedRun(folder, 0, result_of(late, 2.0, **more))

    trial = search_in(tmp_path, run_in).test(2.0, True)
    assert (trial.valid, trial.why, trial.completed) == (not why, why, 2.0)


def test_a_test_with_too_many_late_requests_is_stopped(tmp_path: Path) -> None:
    def run_in(folder: Path, mpirun: Any, options: Any, watch: Callable[[], str]) -> EndedRun:
        folder.mkdir(parents=True)
        assert watch() == ""
        (folder / "result.json").write_text(json.dumps({"phase": "test", "requests_expected": 300}))
        rows = np.zeros(2, RECORD)
        rows["ttft"] = rows["latency"] = 0.9
        write_rows(folder, rows)
        watch._next = 0.0  # type: ignore[attr-defined]
        return EndedRun(folder, 0, {}, watch())

    trial = search_in(tmp_path, run_in).test(2.0, False)
    assert not trial.valid and trial.completed == 0.0
    assert trial.why == "2 of 300 first tokens were later than 500 ms already; LoadGen allows 0"
