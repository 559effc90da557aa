"""LoadGen's early stopping: the number of queries that a VALID test needs.

LoadGen accepts a latency percentile at 99 % confidence. If each query were late with probability 1 -
percentile, fewer than 1 % of all tests would have so few late queries. Source: mlcommons/inference,
loadgen/early_stopping.cc (tolerance 0, confidence 0.99).
"""

from __future__ import annotations

import math

_DOUBT = 0.01  # 1 - confidence

SERVER_PERCENTILE, SINGLE_STREAM_PERCENTILE = 0.99, 0.90  # for every LLM, from mlperf.conf


def queries_needed(percentile: float, late: int = 0) -> int | None:
    """Return the minimum number of queries for early stopping with `late` late queries, or None.

    Args:
        percentile: A fraction: 0.99.
        late: In Server, the queries above the latency limit; 0 is the best case. In SingleStream, 1: LoadGen
            discards the slowest query before it computes the latency.
    """
    if percentile >= 1:
        return None
    low, high = late, late + 1  # `low` is too few
    while max_late(high, percentile) < late:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if max_late(middle, percentile) >= late:
            high = middle
        else:
            low = middle
    return high


def max_late(queries: int, percentile: float) -> int:
    """Return the maximum number of late queries among `queries`; -1: too few queries, even if none is late.

    The inverse of `queries_needed`: a test with more late queries cannot become VALID. Uses logarithms, so it
    works for any number of queries.
    """
    if not 0 < percentile < 1:
        return queries if percentile <= 0 else -1
    term = queries * math.log(percentile)  # log probability of exactly `late` late queries
    total, late = 0.0, -1
    odds = math.log1p(-percentile) - math.log(percentile)
    while late < queries:
        total += math.exp(term)
        if total >= _DOUBT:
            break
        late += 1
        term += math.log(max(1, queries - late)) - math.log(late + 1) + odds
    return late
