"""LoadGen's early stopping: how many queries a test needs before it can be VALID.

LoadGen accepts a latency percentile at 99 % confidence: if each query were late with probability 1 -
percentile, less than 1 % of all tests would have so few late queries (mlcommons/inference,
loadgen/early_stopping.cc; tolerance 0, confidence 0.99).
"""

from __future__ import annotations

import math

_DOUBT = 0.01  # 1 - confidence

SERVER_PERCENTILE, SINGLE_STREAM_PERCENTILE = 0.99, 0.90  # for every LLM, from mlperf.conf


def queries_needed(percentile: float, late: int = 0) -> int | None:
    """Return the fewest queries that satisfy early stopping with `late` over the latency limit, or None.

    `percentile` is a fraction: 0.99. In scenario Server LoadGen counts the late queries: 0 is the best case.
    In SingleStream it takes the latency from the sorted queries and always discards the slowest: pass 1.
    """
    if percentile >= 1:
        return None
    low, high = late, late + 1  # `low` is too few
    while most_late(high, percentile) < late:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if most_late(middle, percentile) >= late:
            high = middle
        else:
            low = middle
    return high


def most_late(queries: int, percentile: float) -> int:
    """Return how many of `queries` may be late at most; -1: too few queries, even if none is.

    The inverse of `queries_needed`: a test that has more late ones already can't become VALID. In
    logarithms, for any number of queries.
    """
    if not 0 < percentile < 1:
        return queries if percentile <= 0 else -1
    term = queries * math.log(percentile)  # of exactly `late` late ones
    total, late = 0.0, -1
    odds = math.log1p(-percentile) - math.log(percentile)
    while late < queries:
        total += math.exp(term)
        if total >= _DOUBT:
            break
        late += 1
        term += math.log(max(1, queries - late)) - math.log(late + 1) + odds
    return late
