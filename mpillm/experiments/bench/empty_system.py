"""``python -m mpillm.experiments.bench.empty_system N TOKENS_OUT SUT``: LoadGen's own limit, Offline.

A system under test answers N samples inside the callback that issues them, with TOKENS_OUT tokens each. SUT
is the form in which LoadGen issues them: `plain` as objects, like for most systems, or `fast` as numbers,
like for mpillm. Prints the samples per second. LoadGen supports one test per process.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import mlperf_loadgen as lg

from mpillm.loadgen.settings import LoadGenConfig, load_settings, log_settings

_DATASET = 8192  # samples, like in `bench routing`


def samples_per_second(n: int, n_tokens: int, *, fast: bool) -> float:
    """Return the samples that LoadGen issues and completes per second."""
    answered_at = 0.0
    make = lg.QuerySampleResponse

    def issue(samples: list[Any]) -> None:
        nonlocal answered_at
        lg.QuerySamplesComplete([make(sample.id, 0, 0, n_tokens) for sample in samples])
        answered_at = time.perf_counter()

    def issue_numbers(ids: list[int], indices: list[int]) -> None:
        nonlocal answered_at
        lg.QuerySamplesComplete([make(id_, 0, 0, n_tokens) for id_ in ids])
        answered_at = time.perf_counter()

    values = {"min_query_count": n, "min_duration": 0}
    settings = load_settings(LoadGenConfig("Offline", "PerformanceOnly", explicit=values), _DATASET)
    construct, destroy, called = (
        (lg.ConstructFastSUT, lg.DestroyFastSUT, issue_numbers)
        if fast
        else (lg.ConstructSUT, lg.DestroySUT, issue)
    )
    system = construct(called, lambda: None)
    library = lg.ConstructQSL(_DATASET, _DATASET, lambda indices: None, lambda indices: None)
    started = time.perf_counter()  # like in mpillm's runs
    with tempfile.TemporaryDirectory(prefix="mpillm-bench-") as folder:
        lg.StartTestWithLogSettings(system, library, settings.test, log_settings(Path(folder)), "")
    lg.DestroyQSL(library)
    destroy(system)
    return n / (answered_at - started)


if __name__ == "__main__":
    print(samples_per_second(int(sys.argv[1]), int(sys.argv[2]), fast=sys.argv[3] == "fast"))
