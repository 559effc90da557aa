"""Whether a system kept up with a Server test: offered and answered rate, and whether its queue grew."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_MIN_REQUESTS = 120  # for a slope
_N_DEVIATIONS = 4.0  # standard deviations of a random walk that a slope must exceed


class Slope(NamedTuple):
    """A line fitted to a latency over the time of issue, in seconds."""

    lower_bound: float  # of the slope, seconds per second; above 0, the latency grew
    level: float  # the line's value at its end
    at: float  # the line's end: the issue of the last request


def queue_slope(rows: NDArray[np.void], latency: str = "ttft") -> Slope | None:
    """Fit a line through a latency by time of issue, over the latest half of the requests.

    `rows`: in order of issue; `latency`: "ttft" or "latency". None with too few requests.
    """
    rows = _answered(rows, latency)
    if len(rows) < _MIN_REQUESTS:
        return None
    latest = rows[len(rows) // 2 :]
    return _line(latest["issued"], latest[latency].astype(np.float64))


def waiting_slope(rows: NDArray[np.void]) -> Slope | None:
    """Fit a line through the number of requests that wait for first tokens, divided by their rate (seconds).

    The number grows in any order of service, whereas `queue_slope` may miss requests that later ones
    overtake. It is counted when each request of the latest half is issued. The first median wait is left out:
    there, it grows in any system. `rows`: in order of issue. None with too few requests.
    """
    rows = _answered(rows, "ttft")
    issued, n = rows["issued"], len(rows)
    if n < _MIN_REQUESTS or not (lasted := float(np.ptp(issued))):
        return None
    waiting = np.arange(n) - np.searchsorted(np.sort(issued + rows["ttft"]), issued, "right")
    settled = int(np.searchsorted(issued, issued[0] + np.median(rows["ttft"])))
    since = max(n // 2, settled)
    if n - since < _MIN_REQUESTS // 2:
        return None
    return _line(issued[since:], waiting[since:] * lasted / (n - 1))


def _answered(rows: NDArray[np.void], latency: str) -> NDArray[np.void]:
    answered: NDArray[np.void] = rows[np.isfinite(rows[latency]) & (rows["error"] == 0)]
    return answered


def _line(x: NDArray[np.float64], y: NDArray[np.float64]) -> Slope | None:
    """Fit a line through the wait of requests (seconds) by time of issue.

    The lower bound is the fitted slope less `_N_DEVIATIONS` standard deviations. Two variances add up: the
    variance of the least-squares fit, and the variance of a queue at its limit, which is a random walk. In T
    seconds, Poisson arrivals at `rate` deviate by sqrt(rate * T) requests. These take sqrt(T / rate) seconds:
    a slope of 1 / sqrt(rate * T) (heavy traffic: Kingman 1962, "On queues in heavy traffic", J. Royal
    Statistical Society B 24(2)). Varying service times add to it; `_N_DEVIATIONS` allows for them.
    """
    centred = x - x.mean()
    if not (spread := float((centred**2).sum())):
        return None
    slope = float((centred * y).sum()) / spread
    apart = y - y.mean() - slope * centred
    fitted = math.sqrt(float((apart**2).sum()) / (len(x) - 2) / spread)
    wander = 1 / math.sqrt(len(x) - 1)  # rate * T arrivals
    level = float(y.mean() + slope * (x[-1] - x.mean()))
    return Slope(slope - _N_DEVIATIONS * math.hypot(fitted, wander), level, float(x[-1]))


def arrival_figures(rows: NDArray[np.void]) -> dict[str, Any]:
    """Return for `result.json` the rates of a Server test, and whether its queue grew.

    The rate of answers is an overloaded system's throughput. Its time is from the first query to the last
    answer, less the shortest latency. From answer to answer it could be 0: late answers may all come in one
    moment. `queue_grew`: first tokens or whole answers came later and later (`queue_slope`; in a
    disaggregated run, only the generation instances may have a queue), or more and more requests waited for
    first tokens (`waiting_slope`). None: too few requests, or too long waits for first tokens.
    `rows`: in order of issue.
    """
    waiting = waiting_slope(rows)
    slopes = [queue_slope(rows), queue_slope(rows, "latency"), waiting]
    issued, latency = rows["issued"], rows["latency"]
    known = [slope.lower_bound for slope in slopes if slope is not None]
    is_known = bool(known) and (waiting is not None or not np.isfinite(rows["ttft"]).any())
    grew = max(known, default=0.0) > 0
    return {
        "offered_per_second": _rate(len(rows), np.ptp(issued)),
        "answered_per_second": _rate(len(rows), (issued + latency).max() - issued.min() - latency.min()),
        "queue_grew": grew if grew or is_known else None,
    }


def _rate(n: int, lasted: float) -> float | None:
    """Return the rate of `n` events that took `lasted` seconds from the first to the last."""
    return round((n - 1) / float(lasted), 4) if n > 1 and lasted > 0 else None
