"""Comparison of scores with a workload's accuracy targets."""

from __future__ import annotations

from dataclasses import dataclass

from mpillm.workloads.workload import Accuracy


@dataclass(frozen=True)
class Check:
    """A score and its bounds; `value` is None if there is no score."""

    name: str
    value: float | None
    min_value: float
    max_value: float | None = None

    @property
    def passed(self) -> bool:
        return (
            self.value is not None
            and self.value >= self.min_value
            and (self.max_value is None or self.value <= self.max_value)
        )

    def text(self) -> str:
        """Format the check: "rouge1 20.10 (at least 44.43)"."""
        bounds = f"at least {self.min_value:.2f}"
        bounds += f", at most {self.max_value:.2f}" if self.max_value is not None else ""
        return f"{self.name} {'missing' if self.value is None else f'{self.value:.2f}'} ({bounds})"


def check(accuracy: Accuracy, values: dict[str, float], accuracy_target: float) -> list[Check]:
    """Compare scores with the targets. `accuracy_target`: a fraction of the reference, 0.99 or 0.999."""
    checks = [
        Check(name, values.get(name), reference * accuracy_target)
        for name, reference in accuracy.references.items()
    ]
    return [*checks, Check(accuracy.length, values.get(accuracy.length), *accuracy.bounds)]
