"""The steady state of a point of MLPerf Endpoints: the window whose figures are the result (rules, 4.4).

The requests are divided into super-passes, each one pass over the data set in the order of issue. A window is
steady if the time per output token (TPOT) has a plateau in at least four of them, at p50 and p90. A plateau
has no trend (Mann-Kendall's test with Hamed and Rao's correction for autocorrelation), and little variation.

The limits are those of MLCommons' detector, `steady_state_diagnostics` in mlcommons/endpoints (September
2026). Two of its conditions are omitted because the rules do not have them: a minimum duration by the
precision of TPOT, and one by the latency of requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

MIN_PASSES = 4
"""Minimum super-passes of a window."""

MIN_ALL = MIN_PASSES + 1
"""Minimum super-passes of a test: the first one never belongs to the window."""

_MAX_ANALYZED = 256  # super-passes; more passes than this are grouped, so that the search stays short
_MAX_VARIATION = 0.08  # coefficient of variation of a plateau
_MIN_DRIFT = 0.05  # a window with a smaller change does not drift, whatever its significance
_MAX_RAMP = 0.05  # deviation of a leading super-pass from the later level
_MIN_SHIFT = 0.05  # between the means of two plateaus
_SIGNIFICANCE, _Z_95 = 0.05, 1.96
_PLATEAU, _UP, _DOWN = "Plateau", "Drifting Up", "Drifting Down"
_VERDICTS = {_UP: "drifting_up", _DOWN: "drifting_down"}
Array = NDArray[np.float64]


@dataclass
class SuperPass:
    """Requests that follow each other in the order of issue. Times are seconds."""

    first: float = math.inf  # issue time of the first request
    last: float = -math.inf
    ended: int = 0
    completed: int = 0
    tokens: int = 0
    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)  # of responses with at least two tokens

    def add(self, issued: float, ttft: float, tpot: float, tokens: int) -> None:
        """Add a response. `tpot`: NaN or 0 if it has a single token."""
        self.first, self.last = min(self.first, issued), max(self.last, issued)
        self.ended += 1
        self.completed += 1
        self.tokens += tokens
        self.ttft.append(ttft)
        if tpot > 0:
            self.tpot.append(tpot)

    def add_failure(self, issued: float) -> None:
        """Add a request without a response."""
        self.first, self.last = min(self.first, issued), max(self.last, issued)
        self.ended += 1

    @staticmethod
    def merged(passes: Sequence[SuperPass]) -> SuperPass:
        """Return a super-pass with the requests of several."""
        return SuperPass(
            min(one.first for one in passes),
            max(one.last for one in passes),
            sum(one.ended for one in passes),
            sum(one.completed for one in passes),
            sum(one.tokens for one in passes),
            [value for one in passes for value in one.ttft],
            [value for one in passes for value in one.tpot],
        )


class SuperPasses:
    """Super-passes of a test, filled as requests end."""

    def __init__(self, size: int) -> None:
        """`size`: requests in a super-pass, the samples of the data set."""
        self.size = size
        self._passes: list[SuperPass] = []

    def of(self, request: int) -> SuperPass:
        """Return the super-pass of a request, numbered in the order of issue."""
        while len(self._passes) <= request // self.size:
            self._passes.append(SuperPass())
        return self._passes[request // self.size]

    def complete(self) -> list[SuperPass]:
        """Return the super-passes up to the first one with an outstanding request."""
        done = [one.ended == self.size for one in self._passes]
        return self._passes[: done.index(False) if False in done else len(done)]


@dataclass(frozen=True)
class SteadyState:
    """Result of the search for a steady state."""

    status: str
    verdict: str
    size: int  # requests in a super-pass
    start: int = 0  # first super-pass of the window
    passes: Sequence[SuperPass] = ()  # of the window; empty: there is none
    state: dict[str, str] = field(default_factory=dict)  # of the gating metrics
    other_state: dict[str, str] = field(default_factory=dict)  # of TTFT, which does not decide
    shift: dict[str, Any] | None = None  # to a later plateau

    @property
    def is_official(self) -> bool:
        """Whether the figures of the window are the point's result."""
        return self.status == "windowable"

    @property
    def duration_s(self) -> float:
        """Issue time of the window."""
        return self.passes[-1].last - self.passes[0].first if self.passes else 0.0

    def block(self) -> dict[str, Any]:
        """Return the block `steady_state` of point.yaml."""
        window: dict[str, Any] = {"super_pass_size": self.size}
        if self.passes:
            window |= {
                "super_pass_start": self.start,
                "super_pass_end": self.start + len(self.passes) - 1,
                "n_samples": sum(one.completed for one in self.passes),
                "duration_s": round(self.duration_s, 3),
            }
        block = {"status": self.status, "verdict": self.verdict, "window": window, "state": self.state}
        block |= {"ttft_state": self.other_state} if self.other_state else {}
        return block | ({"anomaly": self.shift} if self.shift else {})

    def figures(self) -> dict[str, float]:
        """Return the point's metrics in the window: tokens/s of the system and of a user, and TTFT in ms."""
        if not self.passes or not (seconds := self.duration_s):
            return {}
        everything = SuperPass.merged(self.passes)
        figures = {"system_tps": everything.tokens / seconds}
        if everything.tpot:
            figures["tps_per_user"] = 1 / _percentile(everything.tpot, 90)
        if everything.ttft:
            figures["ttft_p90_ms"] = 1e3 * _percentile(everything.ttft, 90)
        return figures


def find_steady_state(passes: Sequence[SuperPass], size: int, min_s: float) -> SteadyState:
    """Search the complete super-passes of a test for its steady state.

    Args:
        size: Requests in one of `passes`.
        min_s: Minimum issue time of the window.
    """
    if not passes:
        return SteadyState("partial_dataset", "not found", size)
    group = math.ceil(len(passes) / _MAX_ANALYZED)
    if group > 1:
        size *= group
        n = len(passes) // group
        passes = [SuperPass.merged(passes[i * group : (i + 1) * group]) for i in range(n)]
    series = {f"{name}_p{p}": _series(passes, name, p) for name in ("tpot", "ttft") for p in (50, 90)}
    gating = {name: values for name, values in series.items() if name.startswith("tpot")}
    plateaus, ramp = _plateaus([*gating.values()], 1), _ramp(gating["tpot_p50"])
    if any(end <= ramp for _, end in plateaus):  # a plateau is not a ramp
        ramp = 1
    else:
        plateaus = _plateaus([*gating.values()], ramp)
    if not plateaus:
        state = {name: _trend(values[ramp:]) for name, values in gating.items()}
        verdict = next((_VERDICTS[one] for one in state.values() if one in _VERDICTS), "not found")
        return SteadyState(
            "insufficient_passes", verdict, size, state=state if verdict != "not found" else {}
        )
    spans = [passes[b - 1].last - passes[a].first for a, b in plateaus]
    long_enough = [i for i, span in enumerate(spans) if span >= min_s]
    chosen = long_enough[0] if long_enough else int(np.argmax(spans))
    a, b = plateaus[chosen]
    shift = _shift(passes, plateaus[chosen:], ramp)
    later = [_trend(values[a:]) for values in gating.values()]
    drift = next((_VERDICTS[one] for one in later if one in _VERDICTS), "")
    return SteadyState(
        "windowable" if long_enough else "insufficient_duration",
        "anomaly" if shift else drift or "STEADY STATE",
        size,
        a,
        passes[a:b],
        dict.fromkeys(gating, _PLATEAU),
        {name: _trend(values[a:b]) for name, values in series.items() if name not in gating},
        shift,
    )


def _percentile(values: Sequence[float], p: float) -> float:
    return float(np.percentile(values, p, method="lower"))


def _series(passes: Sequence[SuperPass], name: str, p: float) -> Array:
    """Return a percentile of each super-pass; NaN where no response has the value."""
    lists = [getattr(one, name) for one in passes]
    return np.array([_percentile(values, p) if values else math.nan for values in lists])


def _ramp(tpot: Array) -> int:
    """Return the leading super-passes, at least one, that are not yet at the level of the later half."""
    later = tpot[len(tpot) // 2 :]
    level = 0.0 if np.isnan(later).all() else float(np.nanmedian(later))
    n = 0
    while n < len(tpot) // 2 and not abs(tpot[n] - level) <= _MAX_RAMP * level:
        n += 1
    return max(1, n)


def _plateaus(metrics: Sequence[Array], start: int) -> list[tuple[int, int]]:
    """Return the longest plateaus from `start` to the right, as [first, end)."""
    n = len(metrics[0])
    plateaus = []
    while start + MIN_PASSES <= n:
        end = start + MIN_PASSES
        while end <= n and all(_is_steady(values[start:end]) for values in metrics):
            end += 1
        if end - 1 >= start + MIN_PASSES:
            plateaus.append((start, end - 1))
            start = end - 1
        else:
            start += 1
    return plateaus


def _is_steady(values: Array) -> bool:
    if np.isnan(values).any() or (mean := float(values.mean())) <= 0:
        return False
    return _trend(values) == _PLATEAU and float(values.std()) / mean <= _MAX_VARIATION


def _trend(values: Array) -> str:
    """Return the trend of a metric: a drift is significant, and not negligible."""
    n = len(values)
    if n < MIN_PASSES or np.isnan(values).any():
        return _PLATEAU
    slope = float(np.polyfit(np.arange(n), values, 1)[0])
    level = float(np.median(values))
    if abs(slope) * (n - 1) < _MIN_DRIFT * level or not (direction := mann_kendall(values)):
        return _PLATEAU
    return _UP if direction > 0 else _DOWN


def mann_kendall(values: Array) -> int:
    """Return the direction of a monotonic trend, 1 or -1; 0: none at 5 % significance.

    The variance is corrected for autocorrelation of the ranks (Hamed and Rao, 1998).
    """
    n = len(values)
    score = float(np.sign(np.subtract.outer(values, values))[np.tril_indices(n, -1)].sum())
    ties = np.unique(values, return_counts=True)[1]
    variance = (n * (n - 1) * (2 * n + 5) - (ties * (ties - 1) * (2 * ties + 5)).sum()) / 18
    if variance <= 0:  # all values are equal
        return 0
    ranks = np.argsort(np.argsort(values, kind="stable")) - (n - 1) / 2
    correlation = np.correlate(ranks, ranks, "full")[n:] / float((ranks**2).sum())  # of lags 1 to n - 1
    lags = np.arange(1, n)
    weights = (n - lags) * (n - lags - 1) * (n - lags - 2)
    significant = np.abs(correlation) > _Z_95 / math.sqrt(n)
    correction = 1 + 2 / (n * (n - 1) * (n - 2)) * float((weights * correlation)[significant].sum())
    if correction > 0:  # otherwise the correction has no meaning for so few values
        variance *= correction
    z = (abs(score) - 1) / math.sqrt(variance)
    if score == 0 or math.erfc(z / math.sqrt(2)) >= _SIGNIFICANCE:
        return 0
    return 1 if score > 0 else -1


def _shift(
    passes: Sequence[SuperPass], plateaus: Sequence[tuple[int, int]], ramp: int
) -> dict[str, Any] | None:
    """Return the change of TPOT from the first plateau to a later one, if a change-point test confirms it."""
    means = np.array([np.mean(one.tpot) if one.tpot else math.nan for one in passes])
    level = float(np.nanmean(means[slice(*plateaus[0])]))
    for a, b in plateaus[1:]:
        change = float(np.nanmean(means[a:b])) / level - 1
        if abs(change) > _MIN_SHIFT and (at := change_point(means[ramp:])) is not None:
            return {"super_pass": ramp + at, "tpot_change_percent": round(100 * change, 1)}
    return None


def change_point(values: Array) -> int | None:
    """Return the index at which the level changes, by Pettitt's test at 5 % significance; None: nowhere."""
    n = len(values)
    if np.isnan(values).any() or n < MIN_PASSES:
        return None
    signs = np.sign(np.subtract.outer(values, values))
    sums = [abs(float(signs[:i, i:].sum())) for i in range(1, n)]
    k = max(sums)
    p = 2 * math.exp(-6 * k**2 / (n**3 + n**2))
    return 1 + int(np.argmax(sums)) if p < _SIGNIFICANCE else None
