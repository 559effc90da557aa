"""Whether scores reach a workload's accuracy targets."""

from __future__ import annotations

from dataclasses import dataclass

from mpillm.workloads.workload import Accuracy


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


def check(accuracy: Accuracy, values: dict[str, float], accuracy_target: float) -> list[Check]:
    """`accuracy_target`: a fraction of the reference, 0.99 or 0.999."""
    checks = [
        Check(name, values.get(name), reference * accuracy_target)
        for name, reference in accuracy.references.items()
    ]
    return [*checks, Check(accuracy.length, values.get(accuracy.length), *accuracy.bounds)]
