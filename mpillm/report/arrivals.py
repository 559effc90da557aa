"""Whether a system kept up with a Server test: offered and answered rate, and whether its queue grew."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_LEAST = 120  # requests before a slope is looked for
_SURE = 4.0  # standard deviations that a slope must exceed, as if the queue only wandered


class Slope(NamedTuple):
    """A line through a latency by time of issue; seconds."""

    least: float  # the least likely slope, seconds per second: above 0, the latency grew
    level: float  # on the line, at the end
    at: float  # the end: when the last of the requests was issued


def queue_slope(rows: NDArray[np.void], latency: str = "ttft") -> Slope | None:
    """Fit a line through a latency by time of issue, over the latest half of the requests.

    `rows`: in order of issue; `latency`: "ttft" or "latency". None with too few requests.
    """
    rows = _answered(rows, latency)
    if len(rows) < _LEAST:
        return None
    half = rows[len(rows) // 2 :]
    return _line(half["issued"], half[latency].astype(np.float64))


def waiting_slope(rows: NDArray[np.void]) -> Slope | None:
    """Fit a line through the number of requests that wait for first tokens, in seconds of their rate.

    It grows in whatever order they are served; as requests wait behind later ones, `queue_slope` may see
    nothing. Counted when each of the latest half comes, but not before the median wait has passed once, in
    which it grows in any system. `rows`: in order of issue. None with too few requests.
    """
    rows = _answered(rows, "ttft")
    issued, n = rows["issued"], len(rows)
    if n < _LEAST or not (lasted := float(np.ptp(issued))):
        return None
    waiting = np.arange(n) - np.searchsorted(np.sort(issued + rows["ttft"]), issued, "right")
    settled = int(np.searchsorted(issued, issued[0] + np.median(rows["ttft"])))
    since = max(n // 2, settled)
    if n - since < _LEAST // 2:
        return None
    return _line(issued[since:], waiting[since:] * lasted / (n - 1))


def _answered(rows: NDArray[np.void], latency: str) -> NDArray[np.void]:
    answered: NDArray[np.void] = rows[np.isfinite(rows[latency]) & (rows["error"] == 0)]
    return answered


def _line(x: NDArray[np.float64], y: NDArray[np.float64]) -> Slope | None:
    """Fit a line through what requests wait (seconds) by time of issue.

    From the fitted slope `_SURE` standard deviations are taken off, of two kinds that add as variances. The
    slope's own, from the distances of the requests from the line (least squares). And that of a queue at its
    limit, which wanders although it does not grow: Poisson arrivals at `rate` leave in T seconds sqrt(rate *
    T) requests more or fewer, which take sqrt(T / rate) seconds, a slope of 1 / sqrt(rate * T) (heavy
    traffic: Kingman 1962, "On queues in heavy traffic", J. Royal Statistical Society B 24(2)). Service times
    that vary add to that; `_SURE` leaves room for it.
    """
    centred = x - x.mean()
    if not (spread := float((centred**2).sum())):
        return None
    slope = float((centred * y).sum()) / spread
    apart = y - y.mean() - slope * centred
    fitted = math.sqrt(float((apart**2).sum()) / (len(x) - 2) / spread)
    wander = 1 / math.sqrt(len(x) - 1)  # rate * T arrivals
    level = float(y.mean() + slope * (x[-1] - x.mean()))
    return Slope(slope - _SURE * math.hypot(fitted, wander), level, float(x[-1]))


def kept_up(rows: NDArray[np.void]) -> dict[str, Any]:
    """Return for `result.json` how a Server test's requests, in order of issue, came and were answered.

    The rate of answers is that from the first query to the last answer, but for the shortest latency: what a
    system that is overloaded can do. (From answer to answer they may all come in one moment, however late.)
    `queue_grew`: first tokens or whole answers came later and later (`queue_slope`; of disaggregated
    instances the second may queue alone), or ever more requests waited for first tokens (`waiting_slope`).
    None: too few requests to tell, or too long waits for first tokens.
    """
    waiting = waiting_slope(rows)
    slopes = [queue_slope(rows), queue_slope(rows, "latency"), waiting]
    issued, latency = rows["issued"], rows["latency"]
    known = [slope.least for slope in slopes if slope is not None]
    told = bool(known) and (waiting is not None or not np.isfinite(rows["ttft"]).any())
    grew = max(known, default=0.0) > 0
    return {
        "offered_per_second": _rate(len(rows), np.ptp(issued)),
        "answered_per_second": _rate(len(rows), (issued + latency).max() - issued.min() - latency.min()),
        "queue_grew": grew if grew or told else None,
    }


def _rate(n: int, lasted: float) -> float | None:
    """Return how many a second there are between the first moment and the last of `n`."""
    return round((n - 1) / float(lasted), 4) if n > 1 and lasted > 0 else None
