"""Verification of finished runs of MLCommons' compliance tests.

Source of bounds and files: `run_verification.py` in compliance/TEST06, TEST07 and TEST09 of
mlcommons/inference. Each test is a performance run whose answers LoadGen logs (`loadgen.audit`).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from disagg.errors import ConfigError
from mpillm.files import as_writable, write_text
from mpillm.loadgen.audit import AUDITS
from mpillm.loadgen.logs import ACCURACY, DETAIL, SUMMARY, LoggedAnswer, read_answers, read_detail
from mpillm.submission.judged_run import JudgedRun
from mpillm.submission.scores import printed_scores


@dataclass(frozen=True)
class ComplianceResult:
    """Result of a verification: the text of its file, and whether the run passes."""

    test: str
    samples: int
    passed: bool
    text: str


def check_test06(answers: Sequence[LoggedAnswer], scenario: str, end_ids: Sequence[int]) -> ComplianceResult:
    """Check the answers of a TEST06 run in LoadGen's `scenario`. `end_ids`: all end tokens."""
    has_first = scenario != "Offline"
    first = not has_first or all(map(_begins_with_first, answers))
    eos = all(_end_tokens(answer, end_ids) <= 1 for answer in answers)
    length = all(answer.count == len(answer.tokens) for answer in answers)
    passed = first and eos and length
    text = (
        f"First token check pass: {first if has_first else 'Skipped'}\n"
        f"EOS check pass: {eos}\n"
        f"Sample length check pass: {length}\n"
        f"TEST06 verification {'complete' if passed else 'failed'}\n"
    )
    return ComplianceResult("TEST06", len(answers), passed, text)


def _begins_with_first(answer: LoggedAnswer) -> bool:
    """Return whether an answer begins with its reported first tokens; False if none were reported."""
    return (
        answer.first is not None
        and len(answer.first) > 0
        and bool(np.array_equal(answer.tokens[: len(answer.first)], answer.first))
    )


def _end_tokens(answer: LoggedAnswer, end_ids: Sequence[int]) -> int:
    """Count the end tokens at an answer's end. As in MLCommons' script, its first token does not count."""
    at_end = np.isin(answer.tokens[1:], end_ids)[::-1]
    return len(at_end) if at_end.all() else int(np.argmin(at_end))


_TEST_BY_SAMPLING = {settings["accuracy_log_sampling_target"]: name for name, settings in AUDITS.items()}
TEST07_MIN_SCORE = 60.698  # exact match, in percent, on its data set
TEST09_BOUNDS = (1150.38, 1406.02)  # mean tokens of an answer: 90 and 110 % of the reference, 1,278.20

FILES = {"TEST06": "verify_accuracy.txt", "TEST07": "verify_accuracy.txt", "TEST09": "verify_output_len.txt"}
"""File that a verification writes, by test."""
_RULE = "=" * 80


def compliance_of(detail: Mapping[str, Any]) -> str | None:
    """Return the compliance test of a run according to its detailed log, or None."""
    if detail.get("effective_test_mode") != "PerformanceOnly":
        return None
    return _TEST_BY_SAMPLING.get(int(detail.get("effective_accuracy_log_sampling_target") or 0))


def verify(run: JudgedRun, end_ids: Sequence[int], evaluated: str | None = None) -> ComplianceResult:
    """Verify a compliance run and write the test's folder in it.

    `evaluated`: for TEST07, a file with the output of the reference's evaluator. Raises ConfigError if the
    run is not a compliance run, or a file cannot be read.
    """
    detail = read_detail(run.path)
    test = compliance_of(detail)
    if test is None:
        raise ConfigError(f"{run.path} is not a compliance run: start one with --compliance_test TEST06")
    if (evaluated is not None) != (test == "TEST07"):
        needs = "needs the output of the reference's evaluator: --evaluated FILE (docs/howto/submission.md)"
        raise ConfigError(
            f"{run.path}: TEST07 {needs}" if evaluated is None else f"{test} takes no --evaluated"
        )
    answers = read_answers(run.path / ACCURACY)
    if test == "TEST06":
        result = check_test06(answers, str(detail["effective_scenario"]), end_ids)
    else:
        result = _test07(answers, Path(str(evaluated))) if test == "TEST07" else _test09(answers)
    folder = run.path / test
    with as_writable(folder):
        (folder / "accuracy").mkdir(parents=True, exist_ok=True)
        shutil.copyfile(run.path / ACCURACY, folder / "accuracy" / ACCURACY)
        if test != "TEST06":
            (folder / "performance" / "run_1").mkdir(parents=True, exist_ok=True)
            for name in (DETAIL, SUMMARY):
                shutil.copyfile(run.path / name, folder / "performance" / "run_1" / name)
        write_text(folder / FILES[test], result.text)
    return result


def _test07(answers: Sequence[LoggedAnswer], printed: Path) -> ComplianceResult:
    """Check the accuracy of a performance run: exact match on the test's data set."""
    try:
        text = printed.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"--evaluated {printed}: {error.strerror}") from None
    if (score := printed_scores(text).get("exact_match")) is None:
        raise ConfigError(f"--evaluated {printed}: no 'exact_match': <number> in it")
    passed = score >= TEST07_MIN_SCORE
    lines = ["", _RULE, "TEST07 Verification Summary", _RULE, f"Accuracy score: {score}"]
    lines += [f"Accuracy threshold: {TEST07_MIN_SCORE}", f"Accuracy check pass: {passed}"]
    lines += [_verdict(passed), ""]
    return ComplianceResult("TEST07", len(answers), passed, text + "\n".join(lines))


def _test09(answers: Sequence[LoggedAnswer]) -> ComplianceResult:
    """Check the mean length of a performance run's answers."""
    lengths = [len(answer.tokens) for answer in answers]
    mean, (min_mean, max_mean) = sum(lengths) / len(lengths), TEST09_BOUNDS
    passed = min_mean <= mean <= max_mean
    lines = [_RULE, "TEST09: Verify Output Token Length in Performance Mode", _RULE, ""]
    lines += [f"Total samples: {len(lengths)}", f"Mean output tokens: {mean:.2f}"]
    lines += [f"Min output tokens: {min(lengths)}", f"Max output tokens: {max(lengths)}"]
    lines += [f"Min threshold: {min_mean}", f"Max threshold: {max_mean}"]
    lines += [f"Min check pass: {mean >= min_mean}", f"Max check pass: {mean <= max_mean}"]
    lines += ["", _verdict(passed), ""]
    return ComplianceResult("TEST09", len(lengths), passed, "\n".join(lines))


def _verdict(passed: bool) -> str:
    return "TEST PASS" if passed else "TEST FAIL"
