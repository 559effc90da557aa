"""Whether repeated prompts get their first token sooner than new prompts: then a server caches prompts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_SPANS, _MIN_SPANS = 10, 5  # of a test; so many must have enough requests of both kinds
_MIN_REQUESTS = 8  # requests of a kind in a span
_MUCH = 0.7


def repeated_prompts(rows: NDArray[np.void]) -> dict[str, float] | None:
    """Compare the first tokens of a Server test's repeated and new prompts.

    Queue and speed change during a test. Therefore only requests in the same span of time are compared.

    Args:
        rows: Records of `requests.bin`.

    Returns:
        For `result.json`: the mean `ttft_ratio` of the medians over `spans` that have both kinds, and the
        number of spans where repeated prompts were `sooner`. None if too few spans have both kinds.
    """
    rows = rows[np.isfinite(rows["ttft"]) & (rows["error"] == 0)]
    rows = rows[np.argsort(rows["issued"], kind="stable")]
    is_new = np.zeros(len(rows), bool)
    is_new[np.unique(rows["index"], return_index=True)[1]] = True
    ratios = []
    for ttft, new in zip(np.array_split(rows["ttft"], _SPANS), np.array_split(is_new, _SPANS), strict=True):
        if min(new.sum(), (~new).sum()) >= _MIN_REQUESTS:
            ratios.append(float(np.median(ttft[~new]) / max(1e-9, np.median(ttft[new]))))
    if len(ratios) < _MIN_SPANS:
        return None
    mean = float(np.exp(np.mean(np.log(np.maximum(ratios, 1e-9)))))
    return {"ttft_ratio": round(mean, 4), "spans": len(ratios), "sooner": sum(ratio < 1 for ratio in ratios)}


def prefix_cache_doubt(repeats: dict[str, float]) -> str:
    """Return the conclusion on the server, in words; "" if the server seems to compute each prompt."""
    if repeats["ttft_ratio"] > _MUCH or repeats["sooner"] < repeats["spans"]:
        return ""
    return (
        f"first tokens of prompts that were sent before took {repeats['ttft_ratio']:.2g} of the time of new"
        " ones: a server keeps prompts in a prefix cache, which MLPerf forbids"
    )
