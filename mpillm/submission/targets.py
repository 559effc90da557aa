"""The accuracy targets of the workloads.

The reference values are from mlcommons/inference: language/<workload>/README.md and the submission checker's
accuracy-target and accuracy-upper-limit (v6.0 and v6.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpillm.submission.scores import Answer, Row, Scores, llama2, llama3, mixtral


@dataclass(frozen=True)
class Task:
    """How a benchmark is scored.

    A score must reach its reference times the accuracy target; the answers' mean length must be within
    bounds.
    """

    score: Callable[[Sequence[Answer], Sequence[Row]], Scores]
    references: dict[str, float]  # by the scores' names
    tokens_per_sample: tuple[float, float]  # least and most


TASKS = {
    "llama2-70b": Task(
        llama2, {"rouge1": 44.4312, "rouge2": 22.0352, "rougeL": 28.6162}, (0.9 * 294.45, 1.1 * 294.45)
    ),
    "mixtral-8x7b": Task(
        mixtral,
        {"rouge1": 45.5989, "rouge2": 23.3526, "rougeL": 30.4608, "gsm8k": 73.66, "mbxp": 60.16},
        (0.9 * 144.84, 1.1 * 145.9),
    ),
    "llama3.1-405b": Task(llama3, {"rougeL": 21.6666, "exact_match": 90.1335}, (0.9 * 684.68, 1.1 * 684.68)),
}


@dataclass(frozen=True)
class Check:
    """A score and its bounds; `value` is None if there is no score."""

    name: str
    value: float | None
    at_least: float
    at_most: float | None = None

    @property
    def passed(self) -> bool:
        return (
            self.value is not None
            and self.value >= self.at_least
            and (self.at_most is None or self.value <= self.at_most)
        )

    def text(self) -> str:
        """Return one phrase: "rouge1 20.10 (at least 44.43)"."""
        bounds = f"at least {self.at_least:.2f}"
        bounds += f", at most {self.at_most:.2f}" if self.at_most is not None else ""
        return f"{self.name} {'missing' if self.value is None else f'{self.value:.2f}'} ({bounds})"


def check(task: Task, values: dict[str, float], accuracy_target: float) -> list[Check]:
    """`accuracy_target`: a fraction of the reference, 0.99 or 0.999."""
    checks = [
        Check(name, values.get(name), reference * accuracy_target)
        for name, reference in task.references.items()
    ]
    low, high = task.tokens_per_sample
    return [*checks, Check("tokens_per_sample", values.get("tokens_per_sample"), low, high)]
