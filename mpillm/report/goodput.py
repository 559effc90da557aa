"""How many requests of a run met latency limits, such as the limits of `--goodput`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpillm.report.request_log import tpot_s
from mpillm.workloads.early_stopping import SERVER_PERCENTILE, max_late

_SECONDS: dict[str, Callable[[NDArray[np.void]], NDArray[Any]]] = {
    "ttft": lambda rows: rows["ttft"],
    "tpot": tpot_s,
    "e2el": lambda rows: rows["latency"],
}


def late(rows: NDArray[np.void], limits: Mapping[str, float]) -> dict[str, int]:
    """Return how many requests exceeded each of `limits` (milliseconds). `rows`: records of the run."""
    return {name: int((_SECONDS[name](rows) > limit / 1e3).sum()) for name, limit in limits.items()}


def is_good(rows: NDArray[np.void], limits: Mapping[str, float]) -> NDArray[np.bool_]:
    """Return which requests met all limits: vLLM calls them good."""
    met: NDArray[np.bool_] = rows["error"] == 0
    for name, limit in limits.items():
        met &= ~(_SECONDS[name](rows) > limit / 1e3)
    return met


def goodput(rows: NDArray[np.void], limits: Mapping[str, float], seconds: float) -> dict[str, Any]:
    """Return for `result.json` how a test that took `seconds` met the limits of `--goodput`.

    `late_allowed`: late answers that LoadGen's early stopping would allow for each limit.
    """
    good = int(is_good(rows, limits).sum())
    return {
        "limits_ms": dict(limits),
        "good_requests_per_second": round(good / seconds, 4) if seconds > 0 else 0.0,
        "late": late(rows, limits),
        "late_allowed": max(0, max_late(len(rows), SERVER_PERCENTILE)),
    }
