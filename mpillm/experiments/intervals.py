"""Confidence intervals: Student's t, means and quantiles of correlated measurements by blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCKS = 20
"""Blocks of a run. Fewer than 10 lose precision, and more than 30 gain nothing (Schmeiser 1982, "Batch size
effects in the analysis of simulation output", Operations Research 30(3))."""

SPANS = 10
"""Time spans of a run, for rates. A span should be longer than a batch, whose requests end together."""

MIN_PER_BLOCK = 5
MAX_PAIRS = 100
"""Highest number of pairs of runs that is practical."""

STARRED = (
    "the interval of the change excludes 0; single runs cannot show how much runs with equal options differ,"
    " `ab` measures that"
)
WITHOUT_INTERVAL = f"fewer than {BLOCKS * MIN_PER_BLOCK} requests, or all in too short a time"


@dataclass(frozen=True)
class Estimate:
    """A figure, its standard error, and the error's degrees of freedom; the error is NaN if unknown."""

    value: float
    error: float = math.nan
    df: float = math.nan

    def half_width(self, confidence: float = 0.95) -> float:
        """Return half the width of the confidence interval."""
        return t_quantile((1 + confidence) / 2, self.df) * self.error if self.df > 0 else math.nan


def by_blocks(
    rows: NDArray[np.void], figure: Callable[[NDArray[np.void]], float], blocks: int = BLOCKS
) -> Estimate:
    """Estimate `figure` of a run's records, in their order, and its error from non-overlapping blocks.

    Batch means: if a block is much longer than the correlation, the figures of `blocks` equal blocks vary
    like independent measurements. For quantiles this is sectioning, centered at the quantile of all records
    (Nakayama 2014, "Confidence intervals for quantiles using sectioning when applying variance-reduction
    techniques", ACM TOMACS 24(4)). With fewer than MIN_PER_BLOCK records per block, the error is NaN.
    """
    estimate = figure(rows)
    if len(rows) < blocks * MIN_PER_BLOCK:
        return Estimate(estimate)
    parts = np.array([figure(part) for part in np.array_split(rows, blocks)])
    parts = parts[np.isfinite(parts)]
    if len(parts) < blocks // 2:
        return Estimate(estimate)
    error = math.sqrt(float(((parts - estimate) ** 2).sum()) / (len(parts) - 1) / len(parts))
    return Estimate(estimate, error, len(parts) - 1)


def per_second(
    starts: NDArray[np.float64],
    ended: NDArray[np.float64],
    amounts: NDArray[np.float64],
    since: float,
    spans: int = SPANS,
) -> Estimate:
    """Estimate a rate from `since` to the last end, and its error from equal spans of time.

    Each amount is spread evenly between its start and its end (seconds). Otherwise a span would contain a
    whole batch or none, because the answers of a batch end together. The error includes the first and the
    last span, in which the system fills and empties. With fewer than MIN_PER_BLOCK amounts per span, the
    error is NaN.
    """
    lasted = float(ended.max()) - since if len(ended) else 0.0
    if not lasted > 0:
        return Estimate(math.nan)
    edges = np.linspace(since, since + lasted, spans + 1)
    estimate = float(amounts.sum()) / lasted
    if len(amounts) < spans * MIN_PER_BLOCK:
        return Estimate(estimate)
    took = np.maximum(ended - starts, 1e-9)
    completed = np.array([(amounts * np.clip((edge - starts) / took, 0, 1)).sum() for edge in edges])
    parts = np.diff(completed) / (lasted / spans)
    return Estimate(estimate, float(parts.std(ddof=1)) / math.sqrt(spans), spans - 1)


def difference(a: Estimate, b: Estimate) -> Estimate:
    """Return b - a, for figures of independent runs: Welch's error, Satterthwaite's degrees of freedom."""
    error = math.hypot(a.error, b.error)
    if not error > 0:
        return Estimate(b.value - a.value, error, a.df)
    df = error**4 / (a.error**4 / a.df + b.error**4 / b.df)
    return Estimate(b.value - a.value, error, df)


@dataclass(frozen=True)
class PairedTest:
    """A paired t test of log ratios b/a."""

    ratio: float  # geometric mean
    low: float  # confidence interval of the ratio, at 1 - alpha
    high: float
    p: float  # two-sided
    alpha: float

    @property
    def real(self) -> bool:
        """Whether a difference this large has a probability below alpha if there is none."""
        return self.p < self.alpha


def paired_test(a: Sequence[float], b: Sequence[float], alpha: float) -> PairedTest:
    """Test whether b differs from a: Student's (1908) t test of the pairs' differences of logarithms.

    Requires values above 0 and at least two pairs.
    """
    logs = np.log(np.asarray(b, np.float64) / np.asarray(a, np.float64))
    n, mean = len(logs), float(logs.mean())
    error = float(logs.std(ddof=1)) / math.sqrt(n)
    if error == 0:  # all ratios are equal
        return PairedTest(math.exp(mean), math.exp(mean), math.exp(mean), 0.0 if mean else 1.0, alpha)
    reach = t_quantile(1 - alpha / 2, n - 1) * error
    p = 2 * (1 - t_cdf(abs(mean) / error, n - 1))
    return PairedTest(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach), p, alpha)


def pairs_needed(seen: PairedTest, n: int) -> int | None:
    """Return the pairs needed for a decision, if mean and deviation stay as in the `n` pairs seen.

    None: more than `MAX_PAIRS`.
    """
    mean, reach = abs(math.log(seen.ratio)), math.log(seen.high / seen.ratio)
    deviation = reach / t_quantile(1 - seen.alpha / 2, n - 1) * math.sqrt(n)
    return next(
        (
            more
            for more in range(n + 1, MAX_PAIRS + 1)
            if mean > t_quantile(1 - seen.alpha / 2, more - 1) * deviation / math.sqrt(more)
        ),
        None,
    )


def t_quantile(probability: float, df: float) -> float:
    """Return the quantile of Student's t distribution; `df` may be a fraction."""
    low, high = -1.0, 1.0
    while t_cdf(low, df) > probability:
        low *= 2
    while t_cdf(high, df) < probability:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        if t_cdf(middle, df) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def t_cdf(t: float, df: float) -> float:
    """Return the distribution function of Student's t, by the regularized incomplete beta function."""
    tail = 0.5 * _beta(df / 2, 0.5, df / (df + t * t))
    return 1 - tail if t > 0 else tail


def _beta(a: float, b: float, x: float) -> float:
    """Return the regularized incomplete beta function I_x(a, b), by a continued fraction (DLMF 8.17.22)."""
    if x in (0.0, 1.0):
        return x
    if x > (a + 1) / (a + b + 2):  # where the other side's fraction converges faster
        return 1 - _beta(b, a, 1 - x)
    front = (
        math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
        / a
    )
    tiny = 1e-300
    f, c, d = 1.0, 1.0, 0.0
    for i in range(300):
        m = i // 2
        if i == 0:
            numerator = 1.0
        elif i % 2:
            numerator = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            numerator = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1 / (1 + numerator * d or tiny)
        c = 1 + numerator / c or tiny
        f *= c * d
        if abs(1 - c * d) < 1e-12:
            break
    return front * (f - 1)
