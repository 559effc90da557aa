"""Scores, worked out by hand, and the command that writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError
from mpillm import cli
from mpillm.loadgen.logs import digest
from mpillm.submission.scores import (
    ScoredResponse,
    by_rouge,
    check,
    gsm8k,
    long_context,
    needle,
    openorca_gsm8k_mbxp,
    pass_at_1,
    question,
)
from mpillm.workloads import get
from tests.helpers.run_directories import log_entry, make_run

A, B = "0123abcd-0123-0123-0123-0123456789ab", "ffffffff-ffff-ffff-ffff-ffffffffffff"


def answers(*texts: str) -> list[ScoredResponse]:
    return [ScoredResponse(text, len(text.split()) + 1) for text in texts]


@pytest.mark.parametrize(
    ("text", "expected", "right"),
    [
        ("So 3 + 4. The answer is 7.", "7", True),
        ("The answer is 5. No: The answer is $1,234 and 9", "1234", True),
        ("It is 3, then 4", "4", True),
        ("It is -2.5", "-2.5", True),
        ("7\nQ: what is 8?", "7", True),
        ("The answer is seven, not 6", "6", True),
        ("The answer is not there: 6", "6", True),
        ("6. The answer is seven", "6", True),  # no number behind the marker: the last one of the whole text
        ("none", "7", False),
        ("The answer is 8", "7", False),
        ("7", "seven", False),
    ],
)
def test_gsm8k(text: str, expected: str, right: bool) -> None:
    assert gsm8k(text, expected) is right


@pytest.mark.parametrize(
    ("text", "expected", "score"),
    [
        (f"{A} and {B}", f"{A} {B}", 100.0),
        ("none", A, 0.0),
        (A, A, 100.0),
        (f"{A} {A}", A, 50.0),
        (B, A, 11.11),
        (A.upper(), A, 100.0),
    ],
)
def test_needle(text: str, expected: str, score: float) -> None:
    """Only the four hyphens of the 36 characters occur in (B, A), a quirk of the reference that the values
    depend on."""
    assert needle(text, expected) == score


@pytest.mark.parametrize(
    ("text", "expected", "score"),
    [
        ("Answer: Paris", "Paris|Lutetia", 100.0),
        ("Answer: 1. Answer: the city of  PA RIS", "London|paris", 100.0),
        ("Answer: Rome", "Paris", 0.0),
        ("Par", "Paris", 100.0),
        ("It is Paris.", "Paris", 100.0),
    ],
)
def test_question(text: str, expected: str, score: float) -> None:
    assert question(text, expected) == score


def test_llama2() -> None:
    """The second has ROUGE-1 precision 2/2 and recall 2/4, ROUGE-2 1/1 and 1/3.

    Stemming makes runs and running one.
    """
    pytest.importorskip("rouge_score")
    scores = by_rouge(
        answers(" the dog runs. ", "a b"), [{"output": "The dog, running"}, {"output": "a b c d"}]
    )
    assert scores.values["rouge1"] == round(100 * (1 + 2 / 3) / 2, 4)
    assert scores.values["rouge2"] == round(100 * (1 + 0.5) / 2, 4)
    assert scores.values["rougeL"] == scores.values["rougeLsum"] == scores.values["rouge1"]
    assert (scores.values["gen_len"], scores.values["gen_num"], scores.values["gen_tok_len"]) == (
        len("the dog runs.") + 3,
        2,
        7,
    )
    assert scores.values["tokens_per_sample"] == 3.5


@pytest.mark.long
def test_rouge_is_that_of_the_library_on_many_processes() -> None:
    scorer = pytest.importorskip("rouge_score.rouge_scorer")
    from mpillm.submission import rouge

    words = ["the", "cat", "sat", "on", "a", "mat", "while", "dogs", "were", "running", "home"]
    texts = [
        " ".join(words[(i * j) % len(words)] for j in range(1, 3 + i % 7)) for i in range(3 * rouge._CHUNK)
    ]
    pairs = list(zip(texts, texts[1:] + texts[:1], strict=True))
    expected = scorer.RougeScorer(["rouge2", "rougeL"], use_stemmer=True)
    found = rouge.scores(["rouge2", "rougeL"], [p for p, _ in pairs], [t for _, t in pairs])
    assert found == [
        {name: 100 * s.fmeasure for name, s in expected.score(target, text).items()} for text, target in pairs
    ]


def test_mixtral() -> None:
    pytest.importorskip("rouge_score")
    rows = [
        {"dataset": "OpenOrca", "id": "x", "input": "", "gt_output": "a b"},
        {"dataset": "GSM8K", "id": "y", "input": "", "gt_output": "7"},
        {"dataset": "GSM8K", "id": "z", "input": "", "gt_output": "8"},
        {"dataset": "MBXP", "id": "python_MBPP/1_f", "input": "def f", "gt_output": "assert f()"},
    ]
    scores = openorca_gsm8k_mbxp(answers("a b", "7", "7", "return 1"), rows)
    assert (scores.values["rouge1"], scores.values["gsm8k"], scores.values["gen_num"]) == (100.0, 50.0, 4)
    assert "mbxp" not in scores.values
    assert scores.completions == [
        {
            "lang": "python",
            "prompt": "def f",
            "test_code": "assert f()",
            "entry_point": "MBPP/1_f",
            "response": "return 1",
        }
    ]


def test_pass_at_1() -> None:
    completions = [{"lang": lang, "entry_point": "f"} for lang in ("python", "cpp", "kotlin")]
    evaluated: dict[str, Any] = {"python_f": {"passed": True}, "cpp_f": {"passed": False}}
    assert pass_at_1(completions, evaluated) == 50.0
    with pytest.raises(KeyError):
        pass_at_1(completions, {"python_f": {"passed": True}})


def test_llama3() -> None:
    pytest.importorskip("rouge_score")
    rows = [
        {"metric": "rouge", "gt_output": "a b c d"},
        {"metric": "niah_em", "gt_output": A},
        {"metric": "qa_em", "gt_output": "Paris"},
    ]
    values = long_context(answers("a b c d", "none", "Answer: paris"), rows).values
    assert (values["rougeL"], values["exact_match"], values["gen_num"]) == (100.0, 50.0, 3)
    with pytest.raises(ConfigError, match="a sample with metric 'rogue': not one of rouge, niah_em, qa_em"):
        long_context(answers("a"), [{"metric": "rogue", "gt_output": "a"}])


@pytest.mark.parametrize(
    ("benchmark", "target", "min_values"),
    [  # accuracy-target and accuracy-upper-limit of MLCommons' submission checker, v6.0
        (
            "llama2-70b",
            0.99,
            {"rouge1": 43.986888, "rouge2": 21.814848, "rougeL": 28.330038, "tokens_per_sample": 265.005},
        ),
        (
            "llama2-70b",
            0.999,
            {"rouge1": 44.3867688, "rouge2": 22.0131648, "rougeL": 28.5875838, "tokens_per_sample": 265.005},
        ),
        (
            "mixtral-8x7b",
            0.99,
            {
                "rouge1": 45.142911,
                "rouge2": 23.119074,
                "rougeL": 30.156192,
                "tokens_per_sample": 130.356,
                "gsm8k": 72.9234,
                "mbxp": 59.5584,
            },
        ),
        (
            "llama3.1-405b",
            0.99,
            {"rougeL": 21.449934, "exact_match": 89.232165, "tokens_per_sample": 616.212},
        ),
        (
            "llama3.1-8b",
            0.99,
            {
                "rouge1": 38.391408,
                "rouge2": 15.748425,
                "rougeL": 24.250743,
                "rougeLsum": 35.43507,
                "gen_len": 7350879.6,
            },
        ),
        (
            "llama3.1-8b-edge",
            0.99,
            {
                "rouge1": 38.6694,
                "rouge2": 15.953553,
                "rougeL": 24.391125,
                "rougeLsum": 35.76276,
                "gen_len": 2746001.7,
            },
        ),
        ("deepseek-r1", 0.99, {"exact_match": 80.544618, "tokens_per_sample": 3497.60466}),
    ],
)
def test_targets_are_the_checkers(benchmark: str, target: float, min_values: dict[str, float]) -> None:
    accuracy = get(benchmark).accuracy
    checks = {c.name: c for c in check(accuracy, dict(min_values), target)}
    assert {name: c.min_value for name, c in checks.items()} == pytest.approx(min_values, rel=1e-9)
    limits = {"llama2-70b": 323.895, "mixtral-8x7b": 160.49, "llama3.1-405b": 753.148}
    limits |= {"llama3.1-8b": 8984408.4, "llama3.1-8b-edge": 3356224.3, "deepseek-r1": 4274.85014}
    assert checks[accuracy.length].max_value == pytest.approx(limits[benchmark])
    assert not any(c.passed for c in check(accuracy, {}, target))
    assert not any(
        c.passed for c in check(accuracy, {name: value - 0.01 for name, value in min_values.items()}, target)
    )
    above = {name: value + 0.01 for name, value in min_values.items()}
    assert all(c.passed for c in check(accuracy, above, target))
    assert not all(c.passed for c in check(accuracy, {**above, accuracy.length: 1e7}, target))


# --- the command ---


def references(path: Path, *rows: dict[str, str]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tokens(text: str) -> Sequence[int]:
    return list(text.encode())


def tiny(path: Path, **more: Any) -> Path:
    """Return an accuracy run of two samples, whose tokens are bytes, in another order than the data set's."""
    log = [log_entry(1, tokens("a b")), log_entry(0, tokens("the dog"))]
    return make_run(path, "accuracy", answers=log, **{"model_scale": "tiny", **more})


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rouge_score")
    data = references(tmp_path / "data.jsonl", {"output": "the dog"}, {"output": "a b c d"})
    run = tiny(tmp_path / "run", dataset_path=str(data))
    assert cli.main(["accuracy", str(run)]) == 0
    text = (run / "accuracy.txt").read_text()
    assert "'rouge1': 83.3333, 'rouge2': 75.0" in text and "'tokens_per_sample': 5.0" in text
    assert text.endswith(f"\nhash={digest(run / 'mlperf_log_accuracy.json')}\n")
    report = json.loads((run / "accuracy.json").read_text())
    assert report["passed"] is False and report["scores"]["gen_tok_len"] == 10
    assert {c["name"]: c["passed"] for c in report["checks"]} == {
        "rouge1": True, "rouge2": True, "rougeL": True, "tokens_per_sample": False
    }  # fmt: skip
    out = capsys.readouterr().out
    assert "2 answers, target 99.9 % of the reference" in out
    assert re.search(r"tokens_per_sample +5.0000  no +at least 265.0050, at most 323.8950", out)


def test_scores_of_the_references_evaluator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """deepseek-r1: lengths are ours, the score is what the evaluator printed about these answers."""
    run = tiny(tmp_path / "run", benchmarks=["deepseek-r1"], accuracy_target=0.99)
    assert cli.main(["accuracy", str(run)]) == 0
    out = capsys.readouterr().out
    assert "exact_match: not scored: name a clone of mlcommons/inference with --inference_repo" in out
    assert "exact_match" not in (run / "accuracy.txt").read_text()
    printed = tmp_path / "printed.txt"
    report = "noise\n\nResults\n\n{'exact_match': 81.25, 'tokens_per_sample': 5.0, 'num-samples': 2}\n"
    printed.write_text(report)
    assert cli.main(["accuracy", str(run), "--evaluated", str(printed)]) == 0
    text = (run / "accuracy.txt").read_text()
    assert "'exact_match': 81.25" in text and "'tokens_per_sample': 5.0" in text
    assert text.endswith(f"\nhash={digest(run / 'mlperf_log_accuracy.json')}\n")
    assert re.search(r"exact_match +81.2500  ok", capsys.readouterr().out)
    for wrong, message in (
        (report.replace("'num-samples': 2", "'num-samples': 4388"), "its num-samples is 4388, this run's 2"),
        (report.replace("5.0", "6.2"), "its tokens_per_sample is 6.2, this run's 5"),
        ("Traceback (most recent call last)", "no 'exact_match': <number> in it"),
    ):
        printed.write_text(wrong)
        assert cli.main(["accuracy", str(run), "--evaluated", str(printed)]) == 2
        assert message in capsys.readouterr().err
    other = tiny(tmp_path / "other")
    assert cli.main(["accuracy", str(other), "--evaluated", str(printed)]) == 2
    assert "are scored without it" in capsys.readouterr().err


def test_mixtral_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rouge_score")
    data = references(
        tmp_path / "data.jsonl",
        {"dataset": "MBXP", "id": "python_f", "input": "p", "gt_output": "t"},
        {"dataset": "GSM8K", "id": "g", "input": "p", "gt_output": "1"},
    )
    run = tiny(tmp_path / "run", dataset_path=str(data), benchmarks=["mixtral-8x7b"], accuracy_target=0.99)
    assert cli.main(["accuracy", str(run)]) == 0
    assert "mbxp: not scored" in capsys.readouterr().out
    assert json.loads((run / "mbxp_completions.json").read_text())[0]["response"] == "the dog"
    evaluated = tmp_path / "evaluated_test.json"
    evaluated.write_text('{"python_f": {"passed": true}}')
    assert cli.main(["accuracy", str(run), "--mbxp", str(evaluated)]) == 0
    assert "'mbxp': 100.0" in (run / "accuracy.txt").read_text()
    evaluated.write_text('{"python_g": {"passed": true}}')
    assert cli.main(["accuracy", str(run), "--mbxp", str(evaluated)]) == 2
    assert f"--mbxp {evaluated}: not an evaluation of this run's" in capsys.readouterr().err


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rouge_score")

    def check_error(expected: str, *argv: object) -> None:
        assert cli.main(["accuracy", *map(str, argv)]) == 2
        assert expected in capsys.readouterr().err

    good = references(tmp_path / "good.jsonl", {"output": "x"}, {"output": "y"})
    check_error("no such run directory", tmp_path / "none")
    check_error("a file, not a run directory", good)
    check_error("has no result.json", tmp_path)
    check_error("name a run with --test_mode AccuracyOnly", make_run(tmp_path / "performance"))
    check_error("start one with --benchmarks", tiny(tmp_path / "any", benchmarks=None))
    failed = {"status": "FAILED", "phase": "load", "failures": [{"cause": "no memory"}]}
    check_error("failed in phase 'load': no memory", tiny(tmp_path / "failed", result=failed))
    check_error("the data set has 3", tiny(tmp_path / "short", n_samples=3, dataset_path=str(good)))
    check_error("LoadGen logged no answer", make_run(tmp_path / "empty", "accuracy"))
    run = tiny(tmp_path / "run")
    check_error("name one with reference answers: --dataset_path", run)
    check_error("none.jsonl does not exist", run, "--dataset_path", tmp_path / "none.jsonl")
    check_error(
        "data set has 1 samples", run, "--dataset_path", references(tmp_path / "less.jsonl", {"output": "x"})
    )
    check_error(
        ":2: no field 'output'",
        run,
        "--dataset_path",
        references(tmp_path / "other.jsonl", {"output": "x"}, {"prompt": "y"}),
    )
    check_error("has no MBXP samples", run, "--mbxp", good)
    check_error("unknown option --tokeniser (did you mean '--tokenizer'?)", run, "--tokeniser", "x")
    check_error("there is no tokenizer.json in it", run, "--dataset_path", good, "--tokenizer", tmp_path)
    check_error("--tokenizer", tiny(tmp_path / "full", model_scale="full"), "--dataset_path", good)
    check_error("name its path with --dataset_path", tiny(tmp_path / "moved", dataset_path="gone.pkl"))
    (run / "mlperf_log_accuracy.json").write_text("[\n{")
    check_error("cut by a full disk", run, "--dataset_path", good)
    (run / "config.json").write_text("[]")
    check_error("config.json: damaged, or not written by a run", run)
    (run / "config.json").unlink()
    check_error("config.json: no such file", run)
    assert not (run / "accuracy.txt").exists()


def test_without_the_library(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "rouge_score", None)
    run = tiny(
        tmp_path / "run",
        dataset_path=str(references(tmp_path / "data.jsonl", {"output": "x"}, {"output": "y"})),
    )
    assert cli.main(["accuracy", str(run)]) == 2
    assert "pip install 'mpillm[accuracy]'" in capsys.readouterr().err
