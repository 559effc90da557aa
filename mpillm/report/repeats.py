"""Whether prompts that come again get their first token sooner than new ones: a server then keeps prompts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_SPANS, _LEAST_SPANS = 10, 5  # of a test; those with too few of either kind are left out
_LEAST = 8  # requests of a kind in a span
_MUCH = 0.7


def repeated_prompts(rows: NDArray[np.void]) -> dict[str, float] | None:
    """Return for `result.json` how the first tokens of a Server test's repeated prompts compare with those of
    new ones; None: it has too few of either.

    `rows`: of `requests.bin`. `ttft_ratio`: the mean, over `spans` of the test that have both, of the ratio
    of medians; `sooner`: spans in which repeated ones were sooner. As queue and speed change with the test,
    only requests that were issued at about the same time are compared.
    """
    rows = rows[np.isfinite(rows["ttft"]) & (rows["error"] == 0)]
    rows = rows[np.argsort(rows["issued"], kind="stable")]
    is_new = np.zeros(len(rows), bool)
    is_new[np.unique(rows["index"], return_index=True)[1]] = True
    ratios = []
    for ttft, new in zip(np.array_split(rows["ttft"], _SPANS), np.array_split(is_new, _SPANS), strict=True):
        if min(new.sum(), (~new).sum()) >= _LEAST:
            ratios.append(float(np.median(ttft[~new]) / max(1e-9, np.median(ttft[new]))))
    if len(ratios) < _LEAST_SPANS:
        return None
    mean = float(np.exp(np.mean(np.log(np.maximum(ratios, 1e-9)))))
    return {"ttft_ratio": round(mean, 4), "spans": len(ratios), "sooner": sum(ratio < 1 for ratio in ratios)}


def kept_prompts(found: dict[str, float]) -> str:
    """Return what that means of a server, in words; "" if it computes each prompt."""
    if found["ttft_ratio"] > _MUCH or found["sooner"] < found["spans"]:
        return ""
    return (
        f"first tokens of prompts that had come before took {found['ttft_ratio']:.2g} of the time of new"
        " ones: a server keeps prompts in a prefix cache, which MLPerf forbids"
    )
