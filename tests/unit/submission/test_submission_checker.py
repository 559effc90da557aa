"""What `submission` lists is what MLCommons' submission checker rejects, check by check, and nothing else.

The expected checks stand here, so that the list is tested everywhere; where MPILLM_INFERENCE_REPO names a
clone of mlcommons/inference, the checker itself is asked as well (make test-slow).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mpillm import cli
from mpillm.loadgen.logs import digest
from mpillm.workloads import get
from mpillm.workloads.rounds import ROUNDS
from tests.helpers.official_checker import STOPS, check_submission, listed, needs_checker
from tests.helpers.run_directories import FULL_SIZE, MACHINE, SAMPLES, log_entry, make_run

GOOD = {"rouge1": 44.4, "rouge2": 22.1, "rougeL": 28.6, "tokens_per_sample": 290.5}
BOTH = ("Offline", "Server")
LATENCIES = (
    "result_first_token_99.00_percentile_latency_ns",
    "result_time_per_output_token_99.00_percentile_ns",
)
V60 = dict(
    zip(
        ("effective_qsl_rng_seed", "effective_sample_index_rng_seed", "effective_schedule_rng_seed"),
        ROUNDS[1].seeds,
        strict=True,
    )
)
MIXTRAL = {"benchmarks": ["mixtral-8x7b"], "accuracy_target": 0.99}
OF_MIXTRAL = {
    f"effective_{key}": 15000
    for key in ("performance_sample_count", "accuracy_sample_count", "samples_per_query")
}
MIXTRAL_SCORES = {
    "rouge1": 45.5,
    "rouge2": 23.3,
    "rougeL": 30.4,
    "gsm8k": 73.7,
    "mbxp": 60.1,
    "tokens_per_sample": 145.0,
}
OF_8B = dict.fromkeys(OF_MIXTRAL, 13368) | {LATENCIES[1]: 90_000_000}
SCORES_8B = {"rouge1": 38.78, "rouge2": 15.91, "rougeL": 24.5, "rougeLsum": 35.8, "gen_len": 8167644}
LLAMA3_1_8B: dict[str, Any] = {
    "config": {"benchmarks": ["llama3.1-8b"], "accuracy_target": 0.99},
    "scores": SCORES_8B,
}
OF_EDGE = dict.fromkeys(OF_MIXTRAL, 5000)
SCORES_EDGE = {"rouge1": 39.1, "rouge2": 16.2, "rougeL": 24.7, "rougeLsum": 36.2, "gen_len": 3051113}
EDGE: dict[str, Any] = {
    "config": {"benchmarks": ["llama3.1-8b-edge"], "accuracy_target": 0.99},
    "scores": SCORES_EDGE,
    "scenarios": ("SingleStream", "Offline"),
}
OF_R1 = dict.fromkeys(OF_MIXTRAL, 4388) | {LATENCIES[1]: 70_000_000}
R1: dict[str, Any] = {
    "config": {"benchmarks": ["deepseek-r1"], "accuracy_target": 0.99},
    "scores": {"exact_match": 81.4, "tokens_per_sample": 3886.2},
}
OF_OSS = dict.fromkeys(OF_MIXTRAL, 6396) | {LATENCIES[1]: 70_000_000}
OSS: dict[str, Any] = {
    "config": {"benchmarks": ["gpt-oss-120b"], "accuracy_target": 0.99},
    "scores": {"exact_match": 82.5, "tokens_per_sample": 9000.0},
    "of_accuracy": {"effective_accuracy_sample_count": 4395},
}


@dataclass(frozen=True)
class Case:
    """Describes a submission, good except for what it says, and the checks that fail in each division
    ("Scenario check")."""

    closed: tuple[str, ...]
    open: tuple[str, ...]
    detail: Mapping[str, Any] = field(default_factory=dict)  # of LoadGen's log, of all runs
    scores: Mapping[str, float] | None = field(default_factory=lambda: GOOD)  # None: no accuracy.txt
    scenarios: tuple[str, ...] = BOTH
    without: tuple[str, ...] = ()  # kinds of runs
    test06: str | None = None  # verify_accuracy.txt, in the place of our own; empty: none
    test07: float = 61.5  # what the evaluator found
    of_accuracy: Mapping[str, Any] = field(default_factory=dict)  # as `detail`, of accuracy runs only
    error: str = ""  # kind of run in whose log LoadGen has an error
    measurements: Mapping[str, str] = field(
        default_factory=lambda: {"starting_weights_filename": "llama", "weight_data_types": "fp8"}
    )
    system: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=lambda: MACHINE)
    config: Mapping[str, Any] = field(default_factory=dict)
    version: str = "v6.1"


def each(*checks: str, scenarios: tuple[str, ...] = BOTH) -> tuple[str, ...]:
    return tuple(f"{scenario} {check}" for scenario in scenarios for check in checks)


def same(checks: tuple[str, ...], **case: Any) -> Case:
    return Case(checks, checks, **case)


def closed_only(checks: tuple[str, ...], **case: Any) -> Case:
    return Case(checks, (), **case)


STOPPED = (STOPS,)
TEST06 = "First token check pass: {}\nEOS check pass: {}\nSample length check pass: True\n"
OLD_MIXTRAL = {"config": MIXTRAL, "detail": {**OF_MIXTRAL, **V60}, "version": "v6.0"}
TINY = {
    f"effective_{key}": 48
    for key in ("performance_sample_count", "accuracy_sample_count", "samples_per_query")
}
SIZES = ("performance_sample_count_check", "min_duration_check", "dataset_check")
NO_BENCHMARK = ("performance_sample_count_check", "accuracy_result_check", "dataset_check")
UNKNOWN_BENCHMARK = (*each(*NO_BENCHMARK), "Offline min_query_count_check")
CASES = {
    "nothing is wrong": same(()),
    "Interactive in the place of Server": same((), scenarios=("Offline", "Interactive")),
    "scaled down": Case(
        (*each(*SIZES, "accuracy_result_check"), "Offline min_query_count_check"),
        each(*SIZES),
        detail={**TINY, "effective_min_duration_ms": 0},
        scores={"rouge1": 0.1, "rouge2": 0.0, "rougeL": 0.1, "tokens_per_sample": 16.0},
        config={"model_scale": "tiny"},
    ),
    "too short": same(each("min_duration_check"), detail={"effective_min_duration_ms": 599_999}),
    "too few samples": same(
        each("performance_sample_count_check"), detail={"effective_performance_sample_count": SAMPLES - 1}
    ),
    "too few samples in the query": closed_only(
        ("Offline min_query_count_check",), detail={"effective_samples_per_query": SAMPLES - 1}
    ),
    "too few answers": same(each("dataset_check"), detail={"effective_accuracy_sample_count": SAMPLES - 1}),
    "too many answers": same(each("dataset_check"), detail={"effective_accuracy_sample_count": SAMPLES + 1}),
    "early stopping": same(("Server latency_check",), detail={"early_stopping_met": False}),
    "a target latency that is allowed": same((), detail={"effective_target_latency_ns": 20_000_000_000}),
    "a longer target latency": same(
        ("Server latency_check",), detail={"effective_target_latency_ns": 20_000_000_001}
    ),
    "TTFT at its limit": same(("Server llm_check",), detail={LATENCIES[0]: 2_000_000_000}),
    "TTFT below it": same((), detail={LATENCIES[0]: 1_999_999_999}),
    "TPOT at its limit": same(("Server llm_check",), detail={LATENCIES[1]: 200_000_000}),
    "TTFT and TPOT": same(("Server llm_check",), detail=dict.fromkeys(LATENCIES, 10**10)),
    "Interactive within Server's limits": same(
        (), detail={LATENCIES[0]: 1_900_000_000}, scenarios=("Offline", "Interactive")
    ),
    "no token latencies": same(
        each("llm_check", "get_performance_metric_check"),
        detail={
            "requested_use_token_latencies": False,
            "result_tokens_per_second": None,
            "result_completed_tokens_per_second": None,
        }
        | dict.fromkeys(LATENCIES),
    ),
    "seeds of no round": same(each("seeds_check"), detail={"effective_qsl_rng_seed": 1}),
    "accuracy too low": closed_only(each("accuracy_result_check"), scores={**GOOD, "rouge2": 22.01}),
    "answers too long": closed_only(
        each("accuracy_result_check"), scores={**GOOD, "tokens_per_sample": 324.0}
    ),
    "answers too short": closed_only(
        each("accuracy_result_check"), scores={**GOOD, "tokens_per_sample": 265.0}
    ),
    "a score is missing": closed_only(
        each("accuracy_result_check"), scores={"rouge1": 44.4, "rougeL": 28.6, "tokens_per_sample": 290.5}
    ),
    "no accuracy.txt": same(each("accuracy_result_check"), scores=None),
    "an error in the accuracy log": same(each("loadgen_errors_check"), error="accuracy"),
    "an error in the performance log": same((), error="performance"),
    "TEST06 was not run": closed_only(each("dir_exists_check", "accuracy_check"), without=("TEST06",)),
    "TEST06 was not verified": closed_only(each("dir_exists_check", "accuracy_check"), test06=""),
    "TEST06 failed": closed_only(each("accuracy_check"), test06=TEST06.format("True", "False")),
    "TEST06 skipped a check": same((), test06=TEST06.format("Skipped", "True")),
    "no accuracy run": same(STOPPED, without=("accuracy",)),
    "no performance run": same(STOPPED, without=("performance",)),
    "Offline only": closed_only(("Offline scenarios_check",), scenarios=("Offline",)),
    "Server only": closed_only(("Server scenarios_check",), scenarios=("Server",)),
    "measurements are not known": same(each("required_fields_check"), measurements={}),
    "a machine of which little is known": same(
        each("required_fields_check"),
        machine={**MACHINE, "cpu": {**MACHINE["cpu"], "cores": 0}},  # type: ignore[dict-item]
    ),
    "both kinds of system": same((), system={"system_type": "edge,datacenter"}),
    "a system for the edge": closed_only(STOPPED, system={"system_type": "edge"}),
    "mixtral-8x7b in v6.1": Case(
        STOPPED, UNKNOWN_BENCHMARK, config=MIXTRAL, detail=OF_MIXTRAL, scores=MIXTRAL_SCORES
    ),
    "mixtral-8x7b in v6.0": same((), scores=MIXTRAL_SCORES, **OLD_MIXTRAL),
    "mixtral-8x7b without its MBXP score": closed_only(
        each("accuracy_result_check"),
        scores={name: value for name, value in MIXTRAL_SCORES.items() if name != "mbxp"},
        **OLD_MIXTRAL,
    ),
    "mixtral-8x7b Offline only": closed_only(
        ("Offline scenarios_check",), scores=MIXTRAL_SCORES, scenarios=("Offline",), **OLD_MIXTRAL
    ),
    "llama3.1-8b in v6.1": same(
        (), detail=OF_8B, scenarios=("Offline", "Server", "Interactive"), **LLAMA3_1_8B
    ),
    "llama3.1-8b in v6.0": same((), detail={**OF_8B, **V60}, version="v6.0", **LLAMA3_1_8B),
    "llama3.1-8b with TPOT at Server's limit": same(
        ("Server llm_check",), detail={**OF_8B, LATENCIES[1]: 100_000_000}, **LLAMA3_1_8B
    ),
    "llama3.1-8b with too few samples": Case(
        (*each("performance_sample_count_check"), "Offline min_query_count_check"),
        each("performance_sample_count_check"),
        detail={
            **OF_8B,
            "effective_performance_sample_count": 13367,
            "effective_samples_per_query": 13367,
        },
        **LLAMA3_1_8B,
    ),
    "llama3.1-8b with long answers": closed_only(
        each("accuracy_result_check"),
        detail=OF_8B,
        **LLAMA3_1_8B | {"scores": {**SCORES_8B, "gen_len": 8984409}},
    ),
    "llama3.1-8b with short answers": closed_only(
        each("accuracy_result_check"),
        detail=OF_8B,
        **LLAMA3_1_8B | {"scores": {**SCORES_8B, "gen_len": 7350879}},
    ),
    "llama3.1-8b with a low rougeLsum": closed_only(
        each("accuracy_result_check"),
        detail=OF_8B,
        **LLAMA3_1_8B | {"scores": {**SCORES_8B, "rougeLsum": 35.435}},
    ),
    "llama3.1-8b-edge in v6.1": same((), detail=OF_EDGE, **EDGE),
    "llama3.1-8b-edge in v6.0": same((), detail={**OF_EDGE, **V60}, version="v6.0", **EDGE),
    "llama3.1-8b-edge without SingleStream": closed_only(
        ("Offline scenarios_check",), detail=OF_EDGE, **EDGE | {"scenarios": ("Offline",)}
    ),
    "llama3.1-8b-edge with too few requests": same(
        ("SingleStream latency_check",), detail={**OF_EDGE, "early_stopping_met": False}, **EDGE
    ),
    "llama3.1-8b-edge with long answers": closed_only(
        each("accuracy_result_check", scenarios=EDGE["scenarios"]),
        detail=OF_EDGE,
        **EDGE | {"scores": {**SCORES_EDGE, "gen_len": 3356225}},
    ),
    "llama3.1-8b-edge on a datacenter's system": Case(
        STOPPED, (), detail=OF_EDGE, system={"system_type": "datacenter"}, **EDGE
    ),
    "deepseek-r1 in v6.1": same((), detail=OF_R1, scenarios=("Offline", "Server", "Interactive"), **R1),
    "deepseek-r1 in v6.0": same((), detail={**OF_R1, **V60}, version="v6.0", **R1),
    "deepseek-r1 with a low score": closed_only(
        each("accuracy_result_check"),
        detail=OF_R1,
        **R1 | {"scores": {"exact_match": 80.5, "tokens_per_sample": 3886.2}},
    ),
    "deepseek-r1 with short answers": closed_only(
        each("accuracy_result_check"),
        detail=OF_R1,
        **R1 | {"scores": {"exact_match": 81.4, "tokens_per_sample": 3497.0}},
    ),
    "gpt-oss-120b in v6.1": same((), detail=OF_OSS, scenarios=("Offline", "Server", "Interactive"), **OSS),
    "gpt-oss-120b in v6.0": same((), detail={**OF_OSS, **V60}, version="v6.0", **OSS),
    "gpt-oss-120b with too few answers": same(
        each("dataset_check"),
        detail=OF_OSS,
        **OSS | {"of_accuracy": {"effective_accuracy_sample_count": 6396}},
    ),
    "TEST07 failed": closed_only(each("accuracy_check"), detail=OF_OSS, test07=50.5, **OSS),
    "TEST07 was not run": closed_only(
        each("dir_exists_check", "accuracy_check"), detail=OF_OSS, without=("TEST07",), **OSS
    ),
    "TEST09 was not run": closed_only(
        each("dir_exists_check", "accuracy_check"), detail=OF_OSS, without=("TEST09",), **OSS
    ),
    "an accuracy target of no benchmark": Case(STOPPED, UNKNOWN_BENCHMARK, config={"accuracy_target": 0.995}),
}


def make(folder: Path, case: Case) -> list[Path]:
    """Return the runs of a case."""
    runs = []
    for scenario in case.scenarios:
        loadgens = "Server" if scenario == "Interactive" else scenario
        config = dict(case.config)
        if scenario == "Interactive":
            config["benchmarks"] = [f"{config.get('benchmarks', ['llama2-70b'])[0]}-interactive"]
        length = 1200 if "gpt-oss-120b" in case.config.get("benchmarks", ()) else 3
        answers = [
            log_entry(i, [5] * (length - 1) + [2], None if loadgens == "Offline" else [5]) for i in range(3)
        ]
        tests = get(config.get("benchmarks", ["llama2-70b"])[0]).compliance
        for kind in ("performance", "accuracy", *tests):
            if kind in case.without:
                continue
            path = make_run(
                *(folder / f"{scenario}-{kind}", kind, loadgens, answers),
                detail={**FULL_SIZE, **case.detail, **(case.of_accuracy if kind == "accuracy" else {})},
                machine=case.machine,
                **config,
            )
            if kind == "accuracy" and case.scores is not None:
                (path / "accuracy.txt").write_text(
                    f"\nResults\n\n{case.scores}\n\nhash={digest(path / 'mlperf_log_accuracy.json')}\n"
                )
            if kind == "TEST07":
                (folder / "printed.txt").write_text(f"'exact_match': {case.test07}\n")
                words = ["compliance", str(path), "--evaluated", str(folder / "printed.txt")]
                assert cli.main(words) == (0 if case.test07 > 60 else 4)
            if kind == "TEST09":
                assert cli.main(["compliance", str(path)]) == 0
            if kind == "TEST06" and case.test06 != "":
                assert cli.main(["compliance", str(path)]) == 0
                if case.test06 is not None:
                    (path / "TEST06" / "verify_accuracy.txt").write_text(case.test06)
            if kind == case.error:
                entry = {
                    "key": "error_runtime",
                    "value": "Ending early",
                    "metadata": {"is_error": True, "is_warning": False},
                }
                with (path / "mlperf_log_detail.txt").open("a") as log:
                    log.write(f":::MLLOG {json.dumps(entry)}\n")
            runs.append(path)
    return runs


def submit(
    folder: Path, case: Case, division: str, capsys: pytest.CaptureFixture[str]
) -> tuple[Path, str, int]:
    """Return where the submission is, what was printed, and the exit code."""
    output = folder / "out"
    words = ["--output", output, "--submitter", "Us", "--system_name", "box", "--division", division]
    for name, value in (("measurements", case.measurements), ("system_description", case.system)):
        (folder / f"{name}.json").write_text(json.dumps(value))
        words += [f"--{name}", folder / f"{name}.json"]
    runs = make(folder, case)
    capsys.readouterr()
    code = cli.main([str(word) for word in ("submission", *runs, *words)])
    return output, capsys.readouterr().out, code


def test_all_missing_options_are_named_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(run) for run in make(tmp_path, next(iter(CASES.values())))]
    for run in runs:
        config = json.loads((Path(run) / "config.json").read_text())
        config.pop("system_name", None)
        (Path(run) / "config.json").write_text(json.dumps(config))
    assert cli.main(["submission", *runs]) == 2
    message = "mpillm: mpillm submission: missing options: --output, --submitter, --system_name\n"
    assert capsys.readouterr().err == message
    assert cli.main(["submission", *runs, "--system_name", "box", "--submitter", "Us"]) == 2
    assert capsys.readouterr().err == "mpillm: mpillm submission: missing options: --output\n"


def expected(case: Case, division: str) -> set[tuple[str, ...]]:
    checks: tuple[str, ...] = getattr(case, division)
    return {("", STOPS)} if checks == STOPPED else {tuple(check.split(" ", 1)) for check in checks}


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


def test_a_scenario_that_no_round_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, console, _ = submit(tmp_path, same((), scenarios=(*BOTH, "SingleStream")), "closed", capsys)
    assert "(scenarios_check): llama2-70b-99.9: no round has its SingleStream" in console
