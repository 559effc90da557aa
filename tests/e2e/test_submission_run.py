"""From runs to a submission, by the commands that a user types, and MLCommons' own programs on it.

MPILLM_INFERENCE_REPO names a clone of mlcommons/inference; without it the tests with its programs are
skipped.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.official_checker import INFERENCE, check_submission, listed, needs_checker
from tests.helpers.support import DONE, TEST_FAILED, Starter

KINDS = {
    "performance": (),
    "accuracy": ("--test_mode", "AccuracyOnly", "--save_outputs"),
    "TEST06": ("--compliance_test", "TEST06"),
}
SIZES = ("performance_sample_count_check", "min_duration_check", "dataset_check")


class Runs:
    """Holds runs, scaled down, on the dummy core; each is made when it is first asked for."""

    def __init__(self, starter: Starter) -> None:
        self.starter = starter

    def get(self, scenario: str, kind: str, benchmark: str = "llama2-70b-99.9") -> Path:
        folder = self.starter.folder / f"{benchmark}-{scenario}-{kind}"
        if not folder.exists():
            options = ["--benchmarks", benchmark, "--model_scale", "tiny", "--scenarios", scenario]
            if scenario != "Offline":
                options += ["--mode", "disaggregated", "--server_target_qps", "400"]
            self.starter.run(5, *options, *KINDS[kind], log_dir=folder).must(DONE)
        return folder

    def result(self, scenario: str, benchmark: str) -> list[Path]:
        return [self.get(scenario, kind, benchmark) for kind in KINDS]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    starter = Starter("openmpi", tmp_path_factory.mktemp("runs"))
    yield Runs(starter)
    for command in starter.commands:
        command.kill()


def entries(run: Path) -> list[dict[str, str]]:
    return list(json.loads((run / "mlperf_log_accuracy.json").read_text()))


def tokens(text: str) -> list[int]:
    return [int(token) for token in np.frombuffer(bytes.fromhex(text), "<i4")]


def test_accuracy_log_is_what_was_answered(runs: Runs) -> None:
    """In a disaggregated Server test the context instance makes the first token, the generation instance the
    rest."""
    run = runs.get("Server", "accuracy")
    answers = {
        line["index"]: line["output_tokens"]
        for line in map(json.loads, (run / "outputs.jsonl").read_text().splitlines())
    }
    logged = entries(run)
    assert {int(entry["qsl_idx"]): tokens(entry["data"]) for entry in logged} == answers
    assert len(logged) == len(answers) == 48
    for entry in logged:
        assert tokens(entry["token_data"]) == answers[int(entry["qsl_idx"])][:1]
        assert int(entry["token_count"]) == len(answers[int(entry["qsl_idx"])])
    assert json.loads((run / "result.json").read_text())["status"] == "VALID"


def test_compliance_run(runs: Runs) -> None:
    run = runs.get("Server", "TEST06")
    assert len(entries(run)) == 100
    detail = (run / "mlperf_log_detail.txt").read_text()
    assert "Found Audit Config file" in detail
    assert (run / "audit.config").is_file()
    runs.starter.mpillm("compliance", run).must(DONE)
    assert (run / "TEST06" / "verify_accuracy.txt").read_text().splitlines()[
        -1
    ] == "TEST06 verification complete"


def submit(
    runs: Runs, scenarios: list[str], division: str, benchmark: str = "llama2-70b-99.9"
) -> tuple[Path, str, int]:
    """Return the submission of these scenarios' runs, what was printed, and the exit code."""
    paths = [path for scenario in scenarios for path in runs.result(scenario, benchmark)]
    for path in paths:
        if path.name.endswith("accuracy"):
            runs.starter.mpillm("accuracy", path).must(DONE)
        if path.name.endswith("TEST06"):
            runs.starter.mpillm("compliance", path).must(DONE)
    output = runs.starter.folder / f"submission-{benchmark}-{division}-{'-'.join(scenarios)}"
    measured = runs.starter.folder / "measurements.json"
    measured.write_text(json.dumps({"weight_data_types": "none: the dummy core has no weights"}))
    ended = runs.starter.mpillm(
        *(
            "submission",
            "--output",
            output,
            "--submitter",
            "Us",
            "--division",
            division,
            "--system_name",
            "box",
            "--force",
        ),
        *("--measurements", measured, *paths),
    )
    assert ended.code in (DONE, TEST_FAILED), ended
    return output, ended.out, ended.code


def test_submission(runs: Runs) -> None:
    pytest.importorskip("rouge_score")
    output, console, code = submit(runs, ["Server"], "closed")
    assert code == TEST_FAILED
    result = output / "closed" / "Us" / "results" / "box" / "llama2-70b-99.9" / "Server"
    accuracy = (result / "accuracy" / "accuracy.txt").read_text()
    assert "'rouge1': " in accuracy and "\nhash=" in accuracy
    system = json.loads((output / "closed" / "Us" / "systems" / "box.json").read_text())
    assert system["host_processor_core_count"] >= 1 and system["accelerators_per_node"] == "0"
    assert "min_query_count" in (result / "user.conf").read_text()
    readme = (result / "README.md").read_text()
    assert "python -m mpillm mpirun -n 5 run" in readme
    for option in (
        "--benchmarks llama2-70b --scenarios Server --accuracy_target 0.999",
        "--model_scale tiny",
        "--mode disaggregated",
        "--server_target_qps 400",
        "--compliance_test TEST06",
    ):
        assert option in readme
    assert (
        "rejected by the checker (scenarios_check): llama2-70b-99.9: the closed division also needs Offline"
        in console
    )
    assert (
        console.count(
            "against the rules: llama2-70b-99.9 Server: the model is a tiny one (--model_scale tiny)"
        )
        == 1
    )


@pytest.mark.parametrize("division", ["closed", "open"])
def test_what_is_too_small_is_listed(runs: Runs, division: str) -> None:
    """It is listed in both divisions, between which the checker makes no difference there."""
    pytest.importorskip("rouge_score")
    _, console, code = submit(runs, ["Server"], division)
    assert code == TEST_FAILED
    assert {("llama2-70b-99.9", "Server", check) for check in SIZES} <= listed(console)
    performance, accuracy = (runs.get("Server", kind) for kind in ("performance", "accuracy"))
    for text in (
        f"{performance}: performance_sample_count was 48 samples; must be at least 24576",
        f"{performance}: min_duration_ms was 0 ms; must be at least 600000",
        f"{accuracy}: accuracy_sample_count was 48 samples; the benchmark has 24576",
    ):
        assert text in console


# --- MLCommons' own programs ---


@pytest.mark.slow
@needs_checker
@pytest.mark.parametrize("division", ["closed", "open"])
@pytest.mark.parametrize(
    ("benchmark", "scenarios"),
    [("llama2-70b-99.9", ["Offline", "Server"]), ("llama3.1-8b", ["Offline", "Server", "Interactive"])],
)
def test_checker(runs: Runs, benchmark: str, scenarios: list[str], division: str) -> None:
    """Scaled-down runs are rejected for their size, and in the closed division for made answers' scores.

    Every check that fails is listed, and no other.
    """
    pytest.importorskip("rouge_score")
    output, console, _ = submit(runs, scenarios, division, benchmark)
    verdict = check_submission(output)
    assert verdict.checks >= len(scenarios) * 30, verdict.log[-2000:]
    assert verdict.failed == listed(console), f"{console}\n{verdict.log[-4000:]}"
    by_size = {*SIZES, "min_query_count_check", *(["accuracy_result_check"] if division == "closed" else [])}
    by_load = {"latency_check", "llm_check"}  # of the machine that runs these tests
    assert {check for *_, check in verdict.failed} <= by_size | by_load
    sizes = {(scenario, check) for scenario in scenarios for check in SIZES}
    assert sizes <= {(scenario, check) for _, scenario, check in verdict.failed} and not verdict.accepts


@pytest.mark.slow
@needs_checker
@pytest.mark.parametrize("scenario", ["Offline", "Server"])
def test_official_verification_agrees(runs: Runs, scenario: str, tmp_path: Path) -> None:
    run = runs.get(scenario, "TEST06")
    runs.starter.mpillm("compliance", run).must(DONE)
    script = Path(INFERENCE) / "compliance" / "TEST06" / "run_verification.py"
    subprocess.run(
        [sys.executable, script, "-c", run, "-o", tmp_path, "-s", scenario],
        check=True,
        timeout=300,
        capture_output=True,
    )
    for name in ("verify_accuracy.txt", "accuracy/mlperf_log_accuracy.json"):
        assert (tmp_path / "TEST06" / name).read_bytes() == (run / "TEST06" / name).read_bytes()


@pytest.mark.slow
@needs_checker
def test_official_truncation_agrees(runs: Runs, tmp_path: Path) -> None:
    pytest.importorskip("rouge_score")
    ours, *_ = submit(runs, ["Server"], "closed")
    whole = tmp_path / "whole"
    shutil.copytree(ours, whole)
    where = Path("closed/Us/results/box/llama2-70b-99.9/Server/accuracy")
    shutil.copyfile(
        runs.get("Server", "accuracy") / "mlperf_log_accuracy.json",
        whole / where / "mlperf_log_accuracy.json",
    )
    text = (whole / where / "accuracy.txt").read_text().partition("\nhash=")[0]
    (whole / where / "accuracy.txt").write_text(text)
    script = Path(INFERENCE) / "tools" / "submission" / "truncate_accuracy_log.py"
    theirs = tmp_path / "theirs"
    subprocess.run(
        [sys.executable, script, "--input", whole, "--output", theirs, "--submitter", "Us"],
        check=True,
        timeout=300,
        capture_output=True,
    )
    for name in ("mlperf_log_accuracy.json", "accuracy.txt"):
        assert (theirs / where / name).read_bytes() == (ours / where / name).read_bytes()
