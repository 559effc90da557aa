"""Confidence intervals: Student's t, means and quantiles of correlated measurements by blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCKS = 20
"""Blocks of a run. Schmeiser (1982), "Batch size effects in the analysis of simulation output", Operations
Research 30(3): more than 30 gain nothing, fewer than 10 lose precision."""

SPANS = 10
"""Spans of time of a run, for rates: batches, which end together, should be shorter than a span."""

LEAST_PER_BLOCK = 5
MAX_PAIRS = 100
"""Pairs of runs that a user might still make."""

STARRED = (
    "the interval of the change leaves out 0; how much two runs of the same options differ, one run can't"
    " tell: ab measures that"
)
WITHOUT_INTERVAL = f"fewer than {BLOCKS * LEAST_PER_BLOCK} requests, or all in too short a time"


@dataclass(frozen=True)
class Estimate:
    """A figure, its standard error, and the error's degrees of freedom; NaN error: not known."""

    value: float
    error: float = math.nan
    df: float = math.nan

    def half_width(self, confidence: float = 0.95) -> float:
        """Return how far the confidence interval reaches to either side."""
        return t_quantile((1 + confidence) / 2, self.df) * self.error if self.df > 0 else math.nan


def by_blocks(
    rows: NDArray[np.void], figure: Callable[[NDArray[np.void]], float], blocks: int = BLOCKS
) -> Estimate:
    """Estimate `figure` of a run's records, in their order, and its error from non-overlapping blocks.

    Batch means: the figure of each of `blocks` equal runs of neighbours varies as that of independent runs of
    that length would, if a block is much longer than the correlation. For quantiles this is sectioning
    (Nakayama 2014, "Confidence intervals for quantiles using sectioning when applying variance-reduction
    techniques", ACM TOMACS 24(4)): centred at the quantile of all. Without at least LEAST_PER_BLOCK records a
    block, the error is NaN.
    """
    whole = figure(rows)
    if len(rows) < blocks * LEAST_PER_BLOCK:
        return Estimate(whole)
    parts = np.array([figure(part) for part in np.array_split(rows, blocks)])
    parts = parts[np.isfinite(parts)]
    if len(parts) < blocks // 2:
        return Estimate(whole)
    error = math.sqrt(float(((parts - whole) ** 2).sum()) / (len(parts) - 1) / len(parts))
    return Estimate(whole, error, len(parts) - 1)


def per_second(
    begun: NDArray[np.float64],
    ended: NDArray[np.float64],
    amounts: NDArray[np.float64],
    since: float,
    spans: int = SPANS,
) -> Estimate:
    """Estimate a rate from `since` to the last end, and its error from equal spans of time.

    Each amount is made evenly between its begin and its end (seconds): answers of a batch end together, so
    that spans which count only ends have a whole batch or none. The first and the last span, of a system that
    fills and empties, are in the error. Without LEAST_PER_BLOCK amounts a span, the error is NaN.
    """
    lasted = float(ended.max()) - since if len(ended) else 0.0
    if not lasted > 0:
        return Estimate(math.nan)
    edges = np.linspace(since, since + lasted, spans + 1)
    whole = float(amounts.sum()) / lasted
    if len(amounts) < spans * LEAST_PER_BLOCK:
        return Estimate(whole)
    took = np.maximum(ended - begun, 1e-9)
    made = np.array([(amounts * np.clip((edge - begun) / took, 0, 1)).sum() for edge in edges])
    parts = np.diff(made) / (lasted / spans)
    return Estimate(whole, float(parts.std(ddof=1)) / math.sqrt(spans), spans - 1)


def difference(a: Estimate, b: Estimate) -> Estimate:
    """Return b - a, for figures of independent runs: Welch's error, Satterthwaite's degrees of freedom."""
    error = math.hypot(a.error, b.error)
    if not error > 0:
        return Estimate(b.value - a.value, error, a.df)
    df = error**4 / (a.error**4 / a.df + b.error**4 / b.df)
    return Estimate(b.value - a.value, error, df)


@dataclass(frozen=True)
class Paired:
    """A paired t test of log ratios b/a."""

    ratio: float  # geometric mean
    low: float  # confidence interval of the ratio, at 1 - alpha
    high: float
    p: float  # two-sided
    alpha: float

    @property
    def real(self) -> bool:
        """Whether a difference so large would come with a chance below alpha if there were none."""
        return self.p < self.alpha


def paired_test(a: Sequence[float], b: Sequence[float], alpha: float) -> Paired:
    """Test whether b differs from a: Student's (1908) t test of the differences of pairs, of logarithms here.

    All values above 0, at least two pairs.
    """
    logs = np.log(np.asarray(b, np.float64) / np.asarray(a, np.float64))
    n, mean = len(logs), float(logs.mean())
    error = float(logs.std(ddof=1)) / math.sqrt(n)
    if error == 0:  # equal to the last digit
        return Paired(math.exp(mean), math.exp(mean), math.exp(mean), 0.0 if mean else 1.0, alpha)
    reach = t_quantile(1 - alpha / 2, n - 1) * error
    p = 2 * (1 - t_cdf(abs(mean) / error, n - 1))
    return Paired(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach), p, alpha)


def pairs_needed(seen: Paired, n: int) -> int | None:
    """Return how many pairs decide, if further ones have the mean and the deviation of the `n` seen.

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
    """Return the distribution function of Student's t: by the regularised incomplete beta function."""
    tail = 0.5 * _beta(df / 2, 0.5, df / (df + t * t))
    return 1 - tail if t > 0 else tail


def _beta(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function I_x(a, b): Lentz's continued fraction (DLMF 8.17.22)."""
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
