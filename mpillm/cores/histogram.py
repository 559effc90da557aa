"""Percentiles in constant memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MIN_S = 1e-9
_RATIO = 1.002  # between bin edges: a percentile is within 0.1 % of the true one
_BINS = int(np.ceil(np.log(1e6 / _MIN_S) / np.log(_RATIO)))
# Durations are counted in batches: a call of NumPy takes 20 µs, however few durations it gets.
_CALLS = 256  # of `add`
_DURATIONS = 4096


class Histogram:
    """Durations in seconds, in bins of equal ratio from a nanosecond to a million seconds."""

    def __init__(self) -> None:
        self._counts = np.zeros(_BINS, np.int64)
        self._sum = 0.0
        self._added: list[NDArray[np.float64]] = []  # not counted yet
        self._n_added = 0  # durations of these
        self._ones: list[float] = []  # also not counted yet

    def add(self, seconds: NDArray[np.float64]) -> None:
        """Count durations, shape [n]; the array is kept."""
        self._added.append(seconds)
        self._n_added += len(seconds)
        if len(self._added) >= _CALLS or self._n_added >= _DURATIONS:
            self._count()

    def add_one(self, seconds: float) -> None:
        """Count a duration."""
        self._ones.append(seconds)
        if len(self._ones) >= _CALLS:
            self._count()

    def _count(self) -> None:
        seconds = np.concatenate([*self._added, self._ones])
        if not len(seconds):
            return
        self._added.clear()
        self._n_added = 0
        self._ones.clear()
        bins = np.log(np.maximum(seconds, _MIN_S) / _MIN_S) / np.log(_RATIO)
        self._counts += np.bincount(np.clip(bins.astype(np.int64), 0, _BINS - 1), minlength=_BINS)
        self._sum += float(seconds.sum())

    def cdf_ms(self, max_points: int = 300) -> dict[str, list[float]]:
        """Return ``ms``, and the ``share`` of durations up to each: at most `max_points` points."""
        self._count()
        bins = np.flatnonzero(self._counts)
        shares = np.cumsum(self._counts)[bins] / max(1, int(self._counts.sum()))
        if len(bins) > max_points:  # keep points at equal steps of the share, and both ends
            picked = np.unique(
                np.searchsorted(shares, np.linspace(shares[0], 1, max_points)).clip(0, len(bins) - 1)
            )
            bins, shares = bins[picked], shares[picked]
        ms = _MIN_S * _RATIO ** (bins + 0.5) * 1e3
        return {"ms": np.round(ms, 4).tolist(), "share": np.round(shares, 5).tolist()}

    def summary_ms(self) -> dict[str, float] | None:
        """Return p50, p90, p99 and mean in milliseconds; None without durations.

        Percentiles follow LoadGen, like `mpillm.loadgen.logs.quantile`: the value at floor(share * n).
        """
        self._count()
        total = int(self._counts.sum())
        if total == 0:
            return None
        cumulated = np.cumsum(self._counts)
        result = {}
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            position = int(np.searchsorted(cumulated, int(share * total), side="right"))
            result[name] = round(_MIN_S * _RATIO ** (position + 0.5) * 1e3, 4)
        result["mean"] = round(self._sum / total * 1e3, 4)
        return result
