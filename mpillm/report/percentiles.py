"""Percentiles of a client's requests by LoadGen's definition, if there are enough requests.

Clients have several definitions. With a dozen requests, their results differ by half. `result.json`, console
and HTML report of all runs use LoadGen's (`mpillm.loadgen.logs.quantile`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mpillm.loadgen.logs import quantile

_SHARES = {"p50": 50, "p90": 90, "p99": 99}
_MIN_ABOVE = 100  # percent of a request: at least one request must be above the percentile


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float | None] | None:
    """Return p50, p90, p99 and mean in ms; unknown ones are None (`enough`). None without a finite time."""
    known = np.array(seconds)
    known = known[np.isfinite(known)]
    if not len(known):
        return None
    percentiles = {name: round(1e3 * quantile(known, share / 100), 4) for name, share in _SHARES.items()}
    return enough(percentiles | {"mean": round(1e3 * float(known.mean()), 4)}, len(known))


def enough(latency: Mapping[str, float], n: int) -> dict[str, float | None]:
    """Return statistics of `n` requests, with None in the place of percentiles that need more requests.

    p99 needs 100, p90 10, p50 2.
    """
    return {
        name: value if n * (100 - _SHARES.get(name, 0)) >= _MIN_ABOVE else None
        for name, value in latency.items()
    }


def too_few(latency: Mapping[str, float | None]) -> str:
    """Return a note on the percentiles that are unknown; "" if there are none."""
    names = [
        f"{name} needs {_MIN_ABOVE // (100 - share)}"
        for name, share in _SHARES.items()
        if latency.get(name, 0.0) is None
    ]
    return f"{', '.join(names)} requests" if names else ""
