"""MLCommons' compliance test TEST06: the checks of its answers.

TEST06 shows that an answer is reported as it was generated: its first token is the one that was reported
first, it ends with at most one end token, and its token count is right. The three checks are
those of mlcommons/inference, compliance/TEST06 (`run_verification.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpillm.loadgen.logs import LoggedAnswer


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
