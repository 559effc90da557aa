"""The MLPerf Inference LLM workloads: their properties, names, `tiny` forms, and early stopping."""

from __future__ import annotations

from disagg.errors import ConfigError, nearest
from mpillm.workloads.benchmarks import WORKLOADS as WORKLOADS
from mpillm.workloads.tiny import tiny
from mpillm.workloads.workload import Workload as Workload

TARGETS = {"-99": 0.99, "-99.9": 0.999}
"""Accuracy targets, by the end of a benchmark's name."""


def get(name: str, scale: str = "full") -> Workload:
    """Return a workload by name, in full or ``tiny``. Raises ConfigError with the nearest name."""
    if name not in WORKLOADS:
        raise ConfigError(f"there is no workload {name}{nearest(name, WORKLOADS)}")
    return WORKLOADS[name] if scale == "full" else tiny(WORKLOADS[name])


def accuracy_of(benchmark: str) -> tuple[str, float | None]:
    """Return the workload and the accuracy target, if any, of a name such as llama2-70b-99.9."""
    for suffix, target in TARGETS.items():
        if benchmark.endswith(suffix):
            return benchmark.removesuffix(suffix), target
    return benchmark, None


def plain_form(name: str) -> str:
    """Return the plain form's name of an interactive workload; otherwise `name` itself."""
    return (name in WORKLOADS and WORKLOADS[name].interactive_of) or name


def interactive_form(name: str) -> str | None:
    """Return the name of a workload's interactive form, or None."""
    plain = plain_form(name)
    return next((form.name for form in WORKLOADS.values() if form.interactive_of == plain), None)
