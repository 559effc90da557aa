"""Says of a Server test that still goes on that it can't become VALID."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError
from mpillm.report.arrivals import queue_slope
from mpillm.report.goodput import late
from mpillm.report.request_log import read_requests
from mpillm.workloads.early_stopping import SERVER_PERCENTILE, most_late

_LOOK_S = 0.5
_WHAT = {"ttft": "first tokens", "tpot": "answers by time per token", "e2el": "answers"}


class Watch:
    """Looks at a run's records now and then; `__call__` returns why it is hopeless, or ""."""

    def __init__(self, folder: Path, e2el_ms: float | None = None) -> None:
        """`folder`: the run directory. `e2el_ms`: a limit that LoadGen does not know."""
        self._folder = folder
        self._e2el_ms = e2el_ms
        self._next = 0.0
        self._said: dict[str, float] | None = None

    def __call__(self) -> str:
        now = time.monotonic()
        if now < self._next:
            return ""
        self._next = now + _LOOK_S
        if self._said is None:
            self._said = _loadgen(self._folder)
        if self._said is None:
            return ""
        try:
            rows = read_requests(self._folder)
        except ConfigError:  # nothing answered yet
            return ""
        limits: dict[str, float] = {name: self._said[name] for name in ("ttft", "tpot") if name in self._said}
        if self._e2el_ms is not None:
            limits["e2el"] = self._e2el_ms
        why = hopeless(rows, limits, int(self._said["queries"]), self._said["rate"])
        self._next = time.monotonic() + _LOOK_S + 20 * (time.monotonic() - now)  # at most 5 % of a core
        return why


def _loadgen(folder: Path) -> dict[str, float] | None:
    """Return limits (ms), queries and rate of the run, which it writes before the test; None: not yet."""
    try:
        said = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if said.get("phase") != "test" or not (loadgen := said.get("loadgen")) or not loadgen["expected_queries"]:
        return None
    found = {"queries": float(loadgen["expected_queries"]), "rate": float(loadgen["target_qps"])}
    for name in ("ttft", "tpot"):
        if (limit := loadgen[f"{name}_latency_ms"]) is not None:
            found[name] = float(limit)
    return found


def hopeless(rows: NDArray[np.void], limits: Mapping[str, float], queries: int, rate: float) -> str:
    """Return why a test of `queries` at `rate` per second can't become VALID; "" if it may.

    `rows`: the records so far, in order of issue. `limits` in milliseconds by ttft, tpot, e2el. Two rules:
    more requests are late already than LoadGen's early stopping allows among all (exact: see `most_late`);
    or the queue grows: at the least likely slope of the first-token latency (`queue_slope`), more than twice
    the allowed would be late by the end.
    """
    allowed = most_late(queries, SERVER_PERCENTILE)
    for name, count in late(rows, limits).items():
        if count > max(allowed, 0):
            return (
                f"{count:,} of {queries:,} {_WHAT[name]} were later than {limits[name]:g} ms already;"
                f" LoadGen allows {max(allowed, 0):,}"
            )
    if "ttft" in limits and (slope := queue_slope(rows)) is not None:
        per_s, level, at = slope
        if per_s > 0:
            end = queries / rate
            crossed = at + max(0.0, (limits["ttft"] / 1e3 - level)) / per_s
            if (end - crossed) * rate > 2 * max(allowed, 1):
                return (
                    f"the queue grows: first tokens come {1e3 * per_s:,.0f} ms later each second, so they"
                    f" would be later than {limits['ttft']:g} ms after {crossed:,.0f} of {end:,.0f} s"
                )
    return ""
