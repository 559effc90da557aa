"""From runs to a submission, by the commands that a person types; and MLCommons' own programs on what they left, where there are any.

MPILLM_INFERENCE_REPO names a clone of mlcommons/inference; without it the tests with its programs are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import DONE, TEST_FAILED, Starter

INFERENCE = os.environ.get("MPILLM_INFERENCE_REPO", "")
KINDS = {"performance": (), "accuracy": ("--test_mode", "AccuracyOnly", "--save_outputs"), "TEST06": ("--compliance_test", "TEST06")}
needs_checker = pytest.mark.skipif(not INFERENCE, reason="MPILLM_INFERENCE_REPO is not set: no clone of mlcommons/inference")


class Runs:
    """Runs of llama2-70b, scaled down, on the dummy core; each made when it is first asked for."""

    def __init__(self, starter: Starter) -> None:
        self.starter = starter

    def get(self, scenario: str, kind: str) -> Path:
        folder = self.starter.folder / f"{scenario}-{kind}"
        if not folder.exists():
            options = ["--benchmarks", "llama2-70b", "--model_scale", "tiny", "--accuracy_target", "0.999", "--scenarios", scenario]
            if scenario == "Server":
                options += ["--mode", "disaggregated", "--server_target_qps", "400"]
            self.starter.run(5, *options, *KINDS[kind], log_dir=folder).must(DONE)
        return folder

    def result(self, scenario: str) -> list[Path]:
        return [self.get(scenario, kind) for kind in KINDS]


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
    """Server, disaggregated: the first token is the context instance's, the others the generation instance's."""
    run = runs.get("Server", "accuracy")
    answers = {line["index"]: line["output_tokens"] for line in map(json.loads, (run / "outputs.jsonl").read_text().splitlines())}
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
    assert (run / "TEST06" / "verify_accuracy.txt").read_text().splitlines()[-1] == "TEST06 verification complete"


def submit(runs: Runs, scenarios: list[str], division: str) -> tuple[Path, str]:
    """The submission of these scenarios' runs, and what was printed."""
    paths = [path for scenario in scenarios for path in runs.result(scenario)]
    for path in paths:
        if path.name.endswith("accuracy"):
            runs.starter.mpillm("accuracy", path).must(DONE)
        if path.name.endswith("TEST06"):
            runs.starter.mpillm("compliance", path).must(DONE)
    output = runs.starter.folder / f"submission-{'-'.join(scenarios)}"
    measured = runs.starter.folder / "measurements.json"
    measured.write_text(json.dumps({"weight_data_types": "none: the dummy core has no weights"}))
    ended = runs.starter.mpillm(
        *("submission", "--output", output, "--submitter", "Us", "--division", division, "--system_name", "box", "--force"),
        *("--measurements", measured, *paths),
    )
    assert ended.code in (DONE, TEST_FAILED), ended
    return output, ended.out


def test_submission(runs: Runs) -> None:
    pytest.importorskip("rouge_score")
    output, said = submit(runs, ["Server"], "closed")
    result = output / "closed" / "Us" / "results" / "box" / "llama2-70b-99.9" / "Server"
    accuracy = (result / "accuracy" / "accuracy.txt").read_text()
    assert "'rouge1': " in accuracy and "\nhash=" in accuracy
    system = json.loads((output / "closed" / "Us" / "systems" / "box.json").read_text())
    assert system["host_processor_core_count"] >= 1 and system["accelerators_per_node"] == "0"
    assert "min_query_count" in (result / "user.conf").read_text()
    readme = (result / "README.md").read_text()
    assert "python -m mpillm mpirun -n 5 run" in readme
    for option in (
        "--benchmarks llama2-70b",
        "--model_scale tiny",
        "--mode disaggregated",
        "--server_target_qps 400",
        "--compliance_test TEST06",
    ):
        assert option in readme
    listed = [line.partition("missing or wrong: ")[2] for line in said.splitlines() if "missing or wrong" in line]
    assert "llama2-70b-99.9: the closed division asks for Offline as well" in listed
    assert "llama2-70b-99.9 Server: the model is a tiny one (--model_scale tiny)" in listed


# --- MLCommons' own programs ---

# What a scaled-down run can't have: the samples, the 600 s, the accuracy of a real model (and on a slow machine the latencies).
SIZE = {"performance_sample_count_check", "min_query_count_check", "min_duration_check", "accuracy_result_check", "dataset_check"}
SPEED = {"latency_check", "llm_check"}
DRIVER = """
import json, sys
from submission_checker.checks.base import BaseCheck
plain = BaseCheck.execute
def execute(self, check):
    try:
        passed = bool(plain(self, check))
    except Exception as error:
        passed = repr(error)
    print("CHECK", json.dumps([type(self).__name__, check.__name__, passed]), flush=True)
    return passed is True
BaseCheck.execute = execute
from submission_checker import main
sys.exit(main.main())
"""


@pytest.mark.slow
@needs_checker
@pytest.mark.parametrize("division", ["closed", "open"])
def test_checker(runs: Runs, division: str) -> None:
    """Of the submission checker's checks none fails but those that a small run can't pass."""
    pytest.importorskip("rouge_score")
    output, _ = submit(runs, ["Offline", "Server"], division)
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, "--input", output, "--version", "v6.1", "--submitter", "Us"],
        cwd=runs.starter.folder,
        env={**os.environ, "PYTHONPATH": str(Path(INFERENCE) / "tools" / "submission")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    checks = [json.loads(line.partition(" ")[2]) for line in done.stdout.splitlines() if line.startswith("CHECK")]
    assert len(checks) >= 2 * 30, done.stderr[-2000:]
    failed = {(group, check) for group, check, passed in checks if passed is not True}
    assert {check for _, check in failed} <= SIZE | SPEED, done.stderr[-4000:]
    assert {"PerformanceCheck", "AccuracyCheck", "SystemCheck", "MeasurementsCheck", "ComplianceCheck"} <= {group for group, *_ in checks}


@pytest.mark.slow
@needs_checker
@pytest.mark.parametrize("scenario", ["Offline", "Server"])
def test_official_verification_agrees(runs: Runs, scenario: str, tmp_path: Path) -> None:
    run = runs.get(scenario, "TEST06")
    runs.starter.mpillm("compliance", run).must(DONE)
    script = Path(INFERENCE) / "compliance" / "TEST06" / "run_verification.py"
    subprocess.run([sys.executable, script, "-c", run, "-o", tmp_path, "-s", scenario], check=True, timeout=60, capture_output=True)
    for name in ("verify_accuracy.txt", "accuracy/mlperf_log_accuracy.json"):
        assert (tmp_path / "TEST06" / name).read_bytes() == (run / "TEST06" / name).read_bytes()


@pytest.mark.slow
@needs_checker
def test_official_truncation_agrees(runs: Runs, tmp_path: Path) -> None:
    pytest.importorskip("rouge_score")
    ours, _ = submit(runs, ["Server"], "closed")
    whole = tmp_path / "whole"
    shutil.copytree(ours, whole)
    where = Path("closed/Us/results/box/llama2-70b-99.9/Server/accuracy")
    shutil.copyfile(runs.get("Server", "accuracy") / "mlperf_log_accuracy.json", whole / where / "mlperf_log_accuracy.json")
    text = (whole / where / "accuracy.txt").read_text().partition("\nhash=")[0]
    (whole / where / "accuracy.txt").write_text(text)
    script = Path(INFERENCE) / "tools" / "submission" / "truncate_accuracy_log.py"
    theirs = tmp_path / "theirs"
    subprocess.run(
        [sys.executable, script, "--input", whole, "--output", theirs, "--submitter", "Us"], check=True, timeout=60, capture_output=True
    )
    for name in ("mlperf_log_accuracy.json", "accuracy.txt"):
        assert (theirs / where / name).read_bytes() == (ours / where / name).read_bytes()
