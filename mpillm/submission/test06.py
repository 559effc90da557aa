"""MLCommons' compliance test TEST06: the LoadGen settings of its run, and the checks of its answers.

TEST06 shows that an answer is reported as it was generated: its first token is the one that was reported
first, it ends with at most one end token, and its token count is right. Settings, the three checks and the
files are those of mlcommons/inference, compliance/TEST06 (`audit.config`, `run_verification.py`).
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
from mpillm.loadgen.logs import ACCURACY, LoggedAnswer, read_answers, read_detail
from mpillm.report.run_directory import RunDirectory

# They override every other LoadGen setting. 100 samples of a performance run are logged, and the sample
# indices follow no permutation.
_TEST06 = {
    "mode": 2,
    "accuracy_log_rng_seed": 720381539243781796,
    "accuracy_log_sampling_target": 100,
    "min_query_count": 100,
    "min_duration": 0,
    "sample_concatenate_permutation": 0,
}


def prepare_audit(compliance_test: str | None, audit_conf: str | None, run_directory: Path) -> str:
    """Write a compliance run's ``audit.config``; return its path, or "" for another run. Raises OSError."""
    kept = run_directory / "audit.config"
    if audit_conf:
        try:
            text = Path(audit_conf).read_bytes()
        except OSError as error:
            raise ConfigError(f"--audit_conf {audit_conf}: {error.strerror}", about=["audit_conf"]) from error
        if Path(audit_conf).resolve() != kept.resolve():
            kept.write_bytes(text)
    elif compliance_test:
        kept.write_text("".join(f"*.*.{key} = {value}\n" for key, value in _TEST06.items()), encoding="utf-8")
    else:
        return ""  # a file that an earlier run left is not this run's
    return str(kept)


def is_test06(detail: Mapping[str, Any]) -> bool:
    """Return whether a detailed log is that of a TEST06 run, wherever LoadGen's settings came from."""
    sampled = detail.get("effective_accuracy_log_sampling_target")
    return (
        detail.get("effective_test_mode") == "PerformanceOnly"
        and sampled == _TEST06["accuracy_log_sampling_target"]
    )


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


def verify(run: RunDirectory, end_ids: Sequence[int]) -> Test06:
    """Verify the TEST06 run in `run` and write its ``TEST06`` folder.

    Raises ConfigError if it is not such a run, it failed, or its log was cut.
    """
    detail = read_detail(run.path)
    if not is_test06(detail):
        raise ConfigError(f"{run.path} is not a TEST06 run: start one with --compliance_test TEST06")
    answers = read_answers(run.path / ACCURACY)
    result = check_test06(answers, str(detail["effective_scenario"]), end_ids)
    folder = run.path / "TEST06"
    with as_writable(folder):
        (folder / "accuracy").mkdir(parents=True, exist_ok=True)
        shutil.copyfile(run.path / ACCURACY, folder / "accuracy" / ACCURACY)
        write_text(folder / "verify_accuracy.txt", result.text())
    return result
