"""The reference's evaluator as a child process: fake scripts with the arguments of the real ones."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from mpillm import cli
from mpillm.errors import StageError
from mpillm.submission.evaluator import LOG, Evaluator
from mpillm.workloads import get
from tests.helpers.data_frames import write_frame
from tests.helpers.run_directories import log_entry, make_run

HELPERS = """
import os
def load_lcb_benchmark(): {lcb}
def evaluate_math500(parsed, ground_truth): pass
"""
SCRIPT = """
import argparse, json, pathlib, sys
import eval_accuracy
parser = argparse.ArgumentParser()
for name in {options}: parser.add_argument(name, required=True)
log, frame = vars(parser.parse_args()).values()
assert pathlib.Path("{hub_name}", "tokenizer.json").is_file() and pathlib.Path(frame).is_file()
n = len(json.loads(pathlib.Path(log).read_text()))
print("progress", file=sys.stderr)
"""
PRINTED = {
    "deepseek-r1": "print({'exact_match': 81.25, 'tokens_per_sample': 3.0, 'num-samples': n})",
    "gpt-oss-120b": 'print("Total samples evaluated:", n); print(f"\'exact_match\': {81.25:.3f}")',
}


def make(
    folder: Path, workload: str = "deepseek-r1", lcb: str = "pass", printed: str = ""
) -> tuple[str, ...]:
    """Make a run of two answers and a clone with a fake evaluator; return the command's arguments."""
    record = get(workload)
    run = make_run(
        folder / "run",
        "accuracy",
        answers=[log_entry(0, [5, 6, 7]), log_entry(1, [5, 6, 7])],
        benchmarks=[workload],
        accuracy_target=0.99,
        dataset_path=str(folder / "data.pkl"),
        model_path=str(folder / "model"),
    )
    columns = {name: ["gpqa", "livecodebench_v6"] for name in record.columns.references}
    lengths = {record.columns.lengths: np.ones(2, int)} if record.columns.lengths else {}
    write_frame(folder / "data.pkl", {record.columns.tokens: [[1], [2]], **lengths, **columns})
    (folder / "model").mkdir()
    (folder / "model" / "tokenizer.json").write_text("{}")
    script = folder / "clone" / record.accuracy.evaluator
    (script.parent / "submodules" / "LiveCodeBench" / "lcb_runner").mkdir(parents=True)
    (script.parent / "eval_accuracy.py").write_text(HELPERS.format(lcb=lcb))
    head = SCRIPT.format(options=record.accuracy.evaluator_options, hub_name=record.hf_model)
    name = "" if script.name == "eval_accuracy.py" else "import eval_accuracy"
    body = head.replace("import eval_accuracy", name) + (printed or PRINTED[workload])
    if not name:  # the script is the module that the check imports
        body = HELPERS.format(lcb=lcb) + "if __name__ == '__main__':\n" + body.replace("\n", "\n ")
    script.write_text(body)
    return ("accuracy", str(run), "--inference_repo", str(folder / "clone"))


@pytest.mark.parametrize("workload", PRINTED)
def test_scores(workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(make(tmp_path, workload)) == 0
    run = tmp_path / "run"
    assert json.loads((run / "accuracy.json").read_text())["scores"]["exact_match"] == 81.25
    assert "progress" in (run / LOG).read_text()
    assert f"{get(workload).accuracy.evaluator} runs; its output: " in capsys.readouterr().out


def test_too_few_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """gpt-oss-120b's evaluator leaves out answers that its data frame lacks."""
    printed = PRINTED["gpt-oss-120b"].replace("n)", "n - 1)")
    assert cli.main(make(tmp_path, "gpt-oss-120b", printed=printed)) == 2
    assert f"{LOG}: its num-samples is 1, this run's 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lcb", "message"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'; install the"),
        ("raise OSError('no data')", "eval_accuracy.py: exit code 1: OSError: no data; its output: "),
    ],
)
def test_failed_check(lcb: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without LiveCodeBench's modules or tests, the evaluator would count its answers as wrong."""
    assert cli.main(make(tmp_path, lcb=lcb)) == 1
    error = capsys.readouterr().err
    assert message in error and str(tmp_path / "run" / LOG) in error
    assert not (tmp_path / "run" / "accuracy.txt").exists()


def evaluator(folder: Path, program: str) -> Evaluator:
    script = folder / "script.py"
    script.write_text(program)
    (folder / "eval_accuracy.py").touch()
    return Evaluator(script, (), (), sys.executable, folder, "hub/name", folder / LOG, 60.0)


def test_deadline(tmp_path: Path) -> None:
    """No process of the evaluator is left, not even in another session."""
    program = (
        "import pathlib, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "while True: print('x' * 100_000, flush=True); time.sleep(0.01)"
    )
    one = dataclasses.replace(evaluator(tmp_path, program), max_log_bytes=1_000_000)
    with pytest.raises(StageError, match=r"script\.py: printed more than 1,000,000 bytes; its output: "):
        one.run()
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
    one = dataclasses.replace(one, timeout_s=0.0)
    with pytest.raises(StageError, match=r"did not end within 0 s \(--evaluator_timeout\)"):
        one.run()


def test_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = make(tmp_path)
    run, clone = words[1], words[3]

    def check_error(expected: str, *argv: str) -> None:
        assert cli.main(["accuracy", run, *argv]) == 2
        assert expected in capsys.readouterr().err

    check_error("--evaluator_python: only with --inference_repo", "--evaluator_python", "python3")
    check_error("--evaluator_timeout: only with --inference_repo", "--evaluator_timeout", "1h")
    check_error("--tokenizer: deepseek-r1 needs it only with --inference_repo", "--tokenizer", clone)
    check_error("name only one of them", "--inference_repo", clone, "--evaluated", "printed.txt")
    check_error(
        "no language/deepseek-r1/eval_accuracy.py; name a clone of", "--inference_repo", str(tmp_path)
    )
    (jsonl := tmp_path / "data.jsonl").touch()
    check_error(
        "eval_accuracy.py reads the published data frame",
        *("--inference_repo", clone, "--dataset_path", str(jsonl)),
    )
    check_error("no tokenizer.json in it", "--inference_repo", clone, "--tokenizer", clone)
    check_error(
        "can't start /nowhere/python", "--inference_repo", clone, "--evaluator_python", "/nowhere/python"
    )
    (Path(clone) / "language" / "deepseek-r1" / "submodules" / "LiveCodeBench" / "lcb_runner").rmdir()
    check_error("which scores livecodebench; get the submodules: `git -C ", "--inference_repo", clone)
    other = make_run(tmp_path / "other", "accuracy", answers=[log_entry(0, [5])])
    run = str(other)
    check_error("the answers of llama2-70b are scored without it", "--inference_repo", clone)
