"""Results in the shape of MLPerf Endpoints: what `submission` writes of runs of another client, and lists."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mpillm import cli
from mpillm.submission.client_form import accuracy_results
from mpillm.workloads.rounds import ROUNDS
from tests.helpers.official_checker import STOPS, check_submission, listed, needs_checker
from tests.helpers.run_directories import CLIENT, make_client_run, make_run

SCORES = {"rouge1": 38.78, "rouge2": 15.91, "rougeL": 24.5, "rougeLsum": 35.8, "gen_len": 8167644}
BOTH = ("Offline", "Server")
N = 13368
_, SAMPLE, SCHEDULE = ROUNDS[1].seeds
V60 = {"dataloader_random_seed": SAMPLE, "scheduler_random_seed": SCHEDULE}
OSS = {"benchmarks": ["gpt-oss-120b"]}
WORDS = ("--submitter", "Us", "--system_name", "box")


def tail(key: str = "99.0", **p99: int | None) -> dict[str, Any]:
    """Return latencies whose p99, by early stopping, are these, in milliseconds."""
    return {
        name: {"avg": 10**7, "early_stopping_percentiles": {key: None if ms is None else ms * 10**6}}
        for name, ms in {"ttft": 10, "tpot": 10, **p99}.items()
    }


@dataclass(frozen=True)
class Case:
    """Describes a submission, good except for what it says, and the checks that fail in both divisions."""

    checks: tuple[str, ...] = ()
    closed: tuple[str, ...] = ()  # more, in the closed division
    scenarios: tuple[str, ...] = BOTH
    settings: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    scored: int | None = N  # samples; None: not scored
    without: tuple[str, ...] = ()
    version: str = "v6.1"


def each(*checks: str, scenarios: tuple[str, ...] = BOTH) -> tuple[str, ...]:
    return tuple(f"{scenario} {check}" for scenario in scenarios for check in checks)


INTERACTIVE = ("Offline", "Interactive")
CASES = {
    "nothing is wrong": Case(),
    "Interactive in the place of Server": Case(scenarios=INTERACTIVE),
    "all three": Case(scenarios=(*BOTH, "Interactive")),
    "too short": Case(each("min_duration_check"), settings={"min_duration_ms": 599_999}),
    "seeds of no round": Case(each("seeds_check"), settings={"scheduler_random_seed": 42}),
    "seeds of v6.0": Case(each("get_performance_metric_check"), settings=V60, version="v6.0"),
    "a model that has no such results": Case(
        (*each("endpoints_model_check"), *each("dataset_check")),
        config={"benchmarks": ["llama2-70b"], "accuracy_target": 0.999},
        summary=tail(tpot=100),
    ),
    "TTFT at its limit": Case(("Server llm_check",), summary=tail(ttft=2000)),
    "TTFT below it": Case(summary=tail(ttft=1999)),
    "percentiles of other versions of the client": Case(summary=tail("99", ttft=1999)),
    "TPOT at its limit": Case(("Server llm_check",), summary=tail(tpot=100)),
    "TPOT at Interactive's limit": Case(
        ("Interactive llm_check",), summary=tail(tpot=30), scenarios=(*BOTH, "Interactive")
    ),
    "too few requests for early stopping": Case(("Server llm_check",), summary=tail(tpot=None)),
    "not scored": Case(each("accuracy_result_check", "dataset_check"), scored=None),
    "too few answers": Case(each("dataset_check"), scored=N - 1),
    "no accuracy run": Case(each("accuracy_result_check", "dataset_check"), without=("accuracy",)),
    "no performance run": Case((STOPS,), without=("performance",)),
    "Offline only": Case((), closed=("Offline scenarios_check",), scenarios=("Offline",)),
    "answers of the length that TEST09 wants": Case(
        config=OSS, scored=4395, summary={"output_sequence_lengths": {"avg": 1278.2}}
    ),
    "answers that are too short for TEST09": Case(
        each("compliance_endpoints_check"), config=OSS, scored=4395
    ),
}


def make(folder: Path, case: Case) -> list[Path]:
    runs = []
    for scenario in case.scenarios:
        config = dict(case.config)
        if scenario == "Interactive":
            config["benchmarks"] = [f"{config.get('benchmarks', ['llama3.1-8b'])[0]}-interactive"]
        for kind in ("performance", "accuracy"):
            if kind in case.without:
                continue
            loadgens = "Server" if scenario == "Interactive" else scenario
            path = folder / f"{scenario}-{kind}"
            made = make_client_run(path, kind, loadgens, None, case.settings, case.summary, **config)
            if kind == "accuracy" and case.scored is not None:
                scored = accuracy_results("cnn.pkl", case.scored, SCORES, "mpillm")
                (made / "accuracy_results.json").write_text(json.dumps(scored))
            runs.append(made)
    return runs


def submit(
    folder: Path, case: Case, division: str, capsys: pytest.CaptureFixture[str]
) -> tuple[Path, str, int]:
    measured = folder / "measurements.json"
    measured.write_text(json.dumps({"starting_weights_filename": "llama", "weight_data_types": "fp8"}))
    words = ["--output", folder / "out", *WORDS, "--division", division, "--measurements", measured]
    runs = make(folder, case)
    capsys.readouterr()
    code = cli.main([str(word) for word in ("submission", *runs, *words)])
    return folder / "out", capsys.readouterr().out, code


def expected(case: Case, division: str) -> set[tuple[str, ...]]:
    checks = (*case.checks, *(case.closed if division == "closed" else ()))
    return {("", STOPS)} if checks == (STOPS,) else {tuple(check.split(" ", 1)) for check in checks}


@pytest.mark.parametrize("division", ["closed", "open"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.long
def test_list(name: str, division: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, console, code = submit(tmp_path, CASES[name], division, capsys)
    found = {(scenario, check) for _, scenario, check in listed(console)}
    assert found == expected(CASES[name], division), console
    assert code == (4 if found or "against the rules" in console else 0), console


@pytest.mark.slow
@needs_checker
@pytest.mark.parametrize("division", ["closed", "open"])
@pytest.mark.parametrize("name", CASES)
def test_checker(name: str, division: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, console, _ = submit(tmp_path, CASES[name], division, capsys)
    verdict = check_submission(output, CASES[name].version)
    assert verdict.failed == listed(console), f"{console}\n{verdict.log[-4000:]}"
    assert verdict.accepts == (not verdict.failed)


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are the client's, byte for byte, in the places that the checker looks in."""
    output, _, code = submit(tmp_path, Case(), "closed", capsys)
    assert code == 0
    result = output / "closed" / "Us" / "results" / "box" / "llama3.1-8b" / "Server"
    files = {str(path.relative_to(result)) for path in result.rglob("*") if path.is_file()}
    assert files == {
        "config.yaml",
        "README.md",
        "measurements.json",
        "performance/result_summary.json",
        "accuracy/accuracy_results.json",
    }
    left = tmp_path / "Server-performance" / "harness" / CLIENT
    for name in ("config.yaml", "performance/result_summary.json"):
        assert (result / name).read_bytes() == (left / name).read_bytes()
    assert "--harness inference-endpoint" in (result / "README.md").read_text()


def test_runs_that_the_rules_forbid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The checker accepts failed requests, an incomplete report, and too short a test."""
    summary = {"n_samples_failed": 3, "complete": False, "state": "interrupted", "duration_ns": 10**9}
    _, console, code = submit(tmp_path, Case(summary=summary), "closed", capsys)
    assert code == 4
    for text in ("3 requests failed", "state interrupted", "it lasted 1,000 ms, less than min_duration_ms"):
        assert console.count(f"{text}") >= 2, console


def test_runs_that_are_no_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = make_client_run(tmp_path / "other")
    loadgens = make_run(tmp_path / "loadgens", "accuracy", benchmarks=["llama3.1-8b"], accuracy_target=0.99)
    some = make_client_run(tmp_path / "some")
    file = some / "harness" / CLIENT / "config.yaml"
    file.write_text(file.read_text().replace("max_throughput", "concurrency"))
    foreign = make_client_run(tmp_path / "foreign")
    found = json.loads((foreign / "result.json").read_text())
    found["harness"]["name"] = "aiperf"
    (foreign / "result.json").write_text(json.dumps(found))
    for runs, message in (
        ((other, loadgens), "--harness is 'inference-endpoint' and None"),
        ((some,), "was run with --concurrency, which is neither Offline nor Server"),
        ((foreign,), "aiperf made its load (--harness): there is no verdict of LoadGen"),
    ):
        assert cli.main(["submission", *map(str, runs), "--output", str(tmp_path / "out"), *WORDS]) == 2
        assert message in " ".join(capsys.readouterr().err.split())


def test_accuracy_of_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`accuracy` scores what the client kept of the answers; `submission` takes only what belongs to them."""
    pytest.importorskip("rouge_score")
    rows = [{"input": "a", "tok_input": [1], "output": text} for text in ("one cat sat", "two dogs ran")]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    run = make_client_run(
        *(tmp_path / "run", "accuracy", "Offline", {1: "two dogs ran", 0: "one cat sat"}),
        dataset_path=str(data),
        model_scale="tiny",
    )
    assert cli.main(["accuracy", str(run), "--dataset_path", str(data)]) == 0
    assert "rouge1" in capsys.readouterr().out and not (run / "accuracy.txt").exists()
    (scored,) = json.loads((run / "accuracy_results.json").read_text())["accuracy_scores"]
    assert scored["score"]["rouge1"] == 100.0 and scored["total_samples"] == 2
    events = run / "harness" / CLIENT / "events.jsonl"
    lines = events.read_text().splitlines()
    events.write_text(f"{lines[0]}\n")
    assert cli.main(["accuracy", str(run)]) == 2
    assert "has answers to 1 of 2 samples" in " ".join(capsys.readouterr().err.split())
    assert cli.main(["submission", str(run), "--output", str(tmp_path / "out"), *WORDS]) == 2
    assert "does not belong to" in capsys.readouterr().err
