"""Figures of conversations: first and later turns, interactivity, and conversations within limits."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpillm.loadgen.logs import quantile
from mpillm.report.goodput import is_good
from mpillm.report.percentiles import enough, percentiles_ms
from mpillm.report.request_log import tpot_s


def answered_figures(rows: NDArray[np.void], seconds: float, streamed: bool) -> dict[str, Any]:
    """Return the throughput and the latencies of the requests that did not fail, for `result.json`.

    `rows`: records of the test, which took `seconds`. `streamed`: see `conversation_figures`.
    """
    rows = rows[rows["error"] == 0]
    return {
        "samples_per_second": round(len(rows) / seconds, 4) if seconds > 0 else 0.0,
        "tokens_per_second": round(int(rows["tokens"].sum()) / seconds, 4) if seconds > 0 else 0.0,
        "ttft_ms": percentiles_ms(rows["ttft"].tolist()) if streamed else None,
        "tpot_ms": percentiles_ms(tpot_s(rows).tolist()) if streamed else None,
        "latency_ms": percentiles_ms(rows["latency"].tolist()),
    }


def conversation_figures(
    rows: NDArray[np.void], window_s: tuple[float, float], streamed: bool
) -> dict[str, Any]:
    """Return the figures of the requests that were issued in the window, for `result.json`.

    Args:
        rows: Records of the test.
        window_s: First and last second of the test whose requests count.
        streamed: First tokens were reported when they came.
    """
    rows = rows[rows["error"] == 0]
    rates = _rates(rows, window_s)
    rows = rows[(rows["issued"] >= window_s[0]) & (rows["issued"] <= window_s[1])]
    figures: dict[str, Any] = {
        "window_s": [round(window_s[0], 4), round(window_s[1], 4) if math.isfinite(window_s[1]) else None],
        "requests": len(rows),
        **rates,
        "per_conversation": _per_conversation(rows, streamed),
    }
    for name, part in (("first_turns", rows[rows["turn"] == 0]), ("later_turns", rows[rows["turn"] > 0])):
        figures[name] = {
            "requests": len(part),
            "ttft_ms": percentiles_ms(part["ttft"].tolist()) if streamed else None,
            "tpot_ms": percentiles_ms(tpot_s(part).tolist()) if streamed else None,
            "latency_ms": percentiles_ms(part["latency"].tolist()),
            **_prompt_figures(part),
        }
    return figures | _interactivity(rows)


def _rates(rows: NDArray[np.void], window_s: tuple[float, float]) -> dict[str, float | None]:
    """Return the throughput of the requests whose responses ended in the window; None if it is empty."""
    ends = rows["issued"] + rows["latency"]
    start, end = window_s[0], min(window_s[1], float(ends.max(initial=0.0)))
    rows, seconds = rows[(ends > start) & (ends <= end)], end - start
    if seconds <= 0:
        return {"requests_per_second": None, "tokens_per_second": None}
    return {
        "requests_per_second": round(len(rows) / seconds, 4),
        "tokens_per_second": round(int(rows["tokens"].sum()) / seconds, 4),
    }


def _per_conversation(rows: NDArray[np.void], streamed: bool) -> dict[str, Any]:
    """Return percentiles over conversations, which count once each, however many requests they have.

    `ttft_ms`, `tpot_ms`: of the means of a conversation. `latency_ms`: of the times from the first request to
    the last response, delays between turns included. `cached_share_p50`: median of the cached part of the
    prompts; None if it is not known of all requests.
    """
    sessions, of = np.unique(rows["session"], return_inverse=True)
    n = len(sessions)
    first, last = np.full(n, np.inf), np.zeros(n)
    np.minimum.at(first, of, rows["issued"])
    np.maximum.at(last, of, rows["issued"] + rows["latency"])

    def means(values: NDArray[np.floating[Any]]) -> list[float]:
        known = np.isfinite(values)
        counts, sums = np.bincount(of[known], minlength=n), np.bincount(of[known], values[known], n)
        return [float(one) for one in sums[counts > 0] / counts[counts > 0]]

    prompts = np.bincount(of, rows["prompt"], n)
    cached = np.bincount(of, rows["cached"], n)
    shares = None
    if n and (rows["prompt"] >= 0).all() and (rows["cached"] >= 0).all() and prompts.all():
        shares = round(float(np.median(cached / prompts)), 4)
    return {
        "conversations": n,
        "ttft_ms": percentiles_ms(means(rows["ttft"])) if streamed else None,
        "tpot_ms": percentiles_ms(means(tpot_s(rows))) if streamed else None,
        "latency_ms": percentiles_ms((last - first).tolist()),
        "cached_share_p50": shares,
    }


def _prompt_figures(rows: NDArray[np.void]) -> dict[str, Any]:
    """Return the prompts' tokens and the cached share of them, where instances report them; else None."""
    counted, cached = rows[rows["prompt"] >= 0], rows[rows["cached"] >= 0]
    n = int(cached["prompt"].sum())
    return {
        "prompt_tokens": int(counted["prompt"].sum()) if len(counted) == len(rows) else None,
        "cached_share": round(int(cached["cached"].sum()) / n, 4) if n and len(cached) == len(rows) else None,
    }


def _interactivity(rows: NDArray[np.void]) -> dict[str, float | None]:
    """Return output tokens per second of waiting, in two definitions; None if unknown.

    `e2e_avg_interactivity`: output tokens by seconds of latency, over all requests (MLPerf Endpoints, agentic
    tests). `e2e_normalized_interactivity_p90`: each request's latency by its output tokens, the 90th
    percentile of these, inverted. It needs ten requests. Source: "E2E normalized interactivity" in
    https://github.com/SemiAnalysisAI/InferenceX/blob/main/MODELS.md.
    """
    latency = rows["latency"].astype(np.float64)
    seconds, known = float(latency.sum()), (rows["tokens"] > 0) & (latency > 0)
    per_token = latency[known] / rows["tokens"][known]
    p90 = enough({"p90": quantile(per_token, 0.9)}, len(per_token))["p90"] if len(per_token) else None
    return {
        "e2e_avg_interactivity": round(int(rows["tokens"].sum()) / seconds, 4) if seconds else None,
        "e2e_normalized_interactivity_p90": None if p90 is None else round(1 / p90, 4),
    }


def conversation_goodput(
    rows: NDArray[np.void], cut: Collection[int], limits: Mapping[str, float], seconds: float
) -> dict[str, Any]:
    """Return for `result.json` how many conversations met `limits` (milliseconds) with every request.

    Cancelled requests have no record, so they do not count.

    Args:
        rows: Records of the test.
        cut: Sessions of conversations that are left out, unless a request failed: `--max_duration` or a
            prompt that could not be made has cut them off.
        seconds: Length of the test.
    """
    sessions, number = np.unique(rows["session"], return_inverse=True)
    failed = np.bincount(number, rows["error"] != 0) > 0
    counts = failed | ~np.isin(sessions, [*cut])
    good = int((counts & (np.bincount(number, ~is_good(rows, limits)) == 0)).sum())
    n = int(counts.sum())
    return {
        "conversations": n,
        "good_conversations": good,
        "good_conversations_share": round(good / n, 4) if n else None,
        "good_conversations_per_second": round(good / seconds, 4) if seconds > 0 else 0.0,
    }
