"""How a finished run of one of MLCommons' compliance tests is verified.

Bounds and files are those of mlcommons/inference, compliance/TEST06, TEST07 and TEST09
(`run_verification.py`). Each is a performance run whose answers LoadGen logs: see `loadgen.audit`.
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
class Test06:
    """The results of the three checks; `first_token` is None if LoadGen gets no first tokens (Offline)."""

    samples: int
    first_token: bool | None
    eos: bool
    length: bool

    @property
    def passed(self) -> bool:
        return self.first_token is not False and self.eos and self.length

    def text(self) -> str:
        """Return ``verify_accuracy.txt``, as the submission checker reads it."""
        return (
            f"First token check pass: {'Skipped' if self.first_token is None else self.first_token}\n"
            f"EOS check pass: {self.eos}\n"
            f"Sample length check pass: {self.length}\n"
            f"TEST06 verification {'complete' if self.passed else 'failed'}\n"
        )


def check_test06(answers: Sequence[LoggedAnswer], scenario: str, end_ids: Sequence[int]) -> Test06:
    """Check the answers of a TEST06 run in LoadGen's `scenario`. Any of the `end_ids` is an end token."""
    first = None
    if scenario != "Offline":
        first = all(_begins_with_first(answer) for answer in answers)
    return Test06(
        len(answers),
        first,
        all(_end_tokens(answer, end_ids) <= 1 for answer in answers),
        all(answer.count == len(answer.tokens) for answer in answers),
    )


def _begins_with_first(answer: LoggedAnswer) -> bool:
    """Fail an answer whose first token was never reported."""
    return (
        answer.first is not None
        and len(answer.first) > 0
        and bool(np.array_equal(answer.tokens[: len(answer.first)], answer.first))
    )


def _end_tokens(answer: LoggedAnswer, end_ids: Sequence[int]) -> int:
    """Count the end tokens at an answer's end; as in the original, its first token does not count."""
    at_end = np.isin(answer.tokens[1:], end_ids)[::-1]
    return len(at_end) if at_end.all() else int(np.argmin(at_end))


_BY_SAMPLED = {settings["accuracy_log_sampling_target"]: name for name, settings in AUDITS.items()}
TEST07_LEAST = 60.698  # exact match, in percent, on its data set
TEST09_BOUNDS = (1150.38, 1406.02)  # mean tokens of an answer: 90 and 110 % of the reference's 1,278.20

FILES = {"TEST06": "verify_accuracy.txt", "TEST07": "verify_accuracy.txt", "TEST09": "verify_output_len.txt"}
"""What a verification writes into its folder, by test."""
_RULE = "=" * 80


def compliance_of(detail: Mapping[str, Any]) -> str | None:
    """Return the test of a run from its detailed log, wherever LoadGen's settings came from; None if none."""
    if detail.get("effective_test_mode") != "PerformanceOnly":
        return None
    return _BY_SAMPLED.get(int(detail.get("effective_accuracy_log_sampling_target") or 0))


@dataclass(frozen=True)
class Verified:
    """What a verification found: a file's text, and whether the test is passed."""

    test: str
    samples: int
    passed: bool
    text: str


def verify(run: JudgedRun, end_ids: Sequence[int], evaluated: str | None = None) -> Verified:
    """Verify a compliance run and write the test's folder in it.

    `evaluated`: for TEST07, a file with what the reference's evaluator printed. Raises ConfigError if it is
    no such run, it failed, or its log was cut.
    """
    detail = read_detail(run.path)
    test = compliance_of(detail)
    if test is None:
        raise ConfigError(f"{run.path} is not a compliance run: start one with --compliance_test TEST06")
    if (evaluated is not None) != (test == "TEST07"):
        needs = "needs what the reference's evaluator printed: --evaluated FILE (docs/howto/submission.md)"
        raise ConfigError(
            f"{run.path}: TEST07 {needs}" if evaluated is None else f"{test} takes no --evaluated"
        )
    answers = read_answers(run.path / ACCURACY)
    if test == "TEST06":
        found = check_test06(answers, str(detail["effective_scenario"]), end_ids)
        result = Verified(test, found.samples, found.passed, found.text())
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


def _test07(answers: Sequence[LoggedAnswer], printed: Path) -> Verified:
    """Check that answers of a performance run are right: exact match on a data set of its own."""
    try:
        text = printed.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"--evaluated {printed}: {error.strerror}") from None
    if (score := printed_scores(text).get("exact_match")) is None:
        raise ConfigError(f"--evaluated {printed}: no 'exact_match': <number> in it")
    passed = score >= TEST07_LEAST
    lines = ["", _RULE, "TEST07 Verification Summary", _RULE, f"Accuracy score: {score}"]
    lines += [f"Accuracy threshold: {TEST07_LEAST}", f"Accuracy check pass: {passed}", _verdict(passed), ""]
    return Verified("TEST07", len(answers), passed, text + "\n".join(lines))


def _test09(answers: Sequence[LoggedAnswer]) -> Verified:
    """Check that answers of a performance run are not cut: their mean length."""
    lengths = [len(answer.tokens) for answer in answers]
    mean, (least, most) = sum(lengths) / len(lengths), TEST09_BOUNDS
    passed = least <= mean <= most
    lines = [_RULE, "TEST09: Verify Output Token Length in Performance Mode", _RULE, ""]
    lines += [f"Total samples: {len(lengths)}", f"Mean output tokens: {mean:.2f}"]
    lines += [f"Min output tokens: {min(lengths)}", f"Max output tokens: {max(lengths)}"]
    lines += [f"Min threshold: {least}", f"Max threshold: {most}", f"Min check pass: {mean >= least}"]
    lines += [f"Max check pass: {mean <= most}", "", _verdict(passed), ""]
    return Verified("TEST09", len(lengths), passed, "\n".join(lines))


def _verdict(passed: bool) -> str:
    return "TEST PASS" if passed else "TEST FAIL"
