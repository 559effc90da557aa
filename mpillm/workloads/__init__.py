"""The MLPerf Inference LLM workloads: defaults of options, names, `tiny` forms, early stopping."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mpillm import fields
from mpillm.fields.general import accuracy_of
from mpillm.workloads.benchmarks import WORKLOADS as WORKLOADS
from mpillm.workloads.benchmarks import Workload as Workload

if TYPE_CHECKING:
    from mpillm.data.preprocessed.loader import PreprocessedLoader


def get(name: str, scale: str = "full") -> Workload:
    """Return the workload of this name or alias, in full or ``tiny``; ConfigError names the nearest match."""
    (benchmark,) = fields.benchmarks.parse(name, "workload")
    known, _ = accuracy_of(benchmark)
    if scale == "full":
        return WORKLOADS[known]
    from mpillm.workloads.tiny import tiny

    return tiny(WORKLOADS[known])


def loader(workload: Workload | None, path: str) -> PreprocessedLoader:
    """Return the loader of `path`, as this workload's data set or (None) as any."""
    from mpillm.data.preprocessed.loader import PreprocessedLoader

    return (
        PreprocessedLoader(Path(path), workload.columns, workload.frame_file)
        if workload
        else PreprocessedLoader(Path(path))
    )
