"""``python -m mpillm.bench.empty_system N TOKENS_OUT``: LoadGen's own ceiling, Offline.

A system under test answers N samples inside the callback that issues them, as if each had TOKENS_OUT tokens.
It prints the samples per second. LoadGen takes one test per process.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import mlperf_loadgen as lg

from mpillm.loadgen.settings import LoadGenConfig, load_settings, log_settings

_DATASET = 8192  # samples, as `bench routing` has


def samples_per_second(n: int, n_tokens: int) -> float:
    """Return how many samples LoadGen issues and takes back per second."""
    answered_at = 0.0

    def issue(samples: list[Any]) -> None:
        nonlocal answered_at
        make = lg.QuerySampleResponse
        lg.QuerySamplesComplete([make(sample.id, 0, 0, n_tokens) for sample in samples])
        answered_at = time.perf_counter()

    given = {"min_query_count": n, "min_duration": 0}
    settings = load_settings(LoadGenConfig("Offline", "PerformanceOnly", given=given), _DATASET)
    system = lg.ConstructSUT(issue, lambda: None)
    library = lg.ConstructQSL(_DATASET, _DATASET, lambda indices: None, lambda indices: None)
    started = time.perf_counter()  # where a run of ours starts its clock, too
    with tempfile.TemporaryDirectory(prefix="mpillm-bench-") as folder:
        lg.StartTestWithLogSettings(system, library, settings.test, log_settings(Path(folder)), "")
    lg.DestroyQSL(library)
    lg.DestroySUT(system)
    return n / (answered_at - started)


if __name__ == "__main__":
    print(samples_per_second(*map(int, sys.argv[1:])))
