"""Result of a load test: numbers, JSON and table of `vllm bench serve` (vllm/benchmarks/serve.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mpillm.experiments.loadtest.load_test import Record
from mpillm.workloads.early_stopping import SERVER_PERCENTILE, max_late, queries_needed

_TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
_WIDTH = 50
DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors")
"""Keys of the JSON that are only written on request."""


def numbers(
    records: Sequence[Record], duration: float, percentiles: Sequence[float], limits_ms: Mapping[str, float]
) -> dict[str, Any]:
    """Return the result with the keys of `vllm bench serve`. `limits_ms`: of goodput, by name."""
    good = [record for record in records if not record.error]
    times = {
        "ttft": [record.ttft for record in good],
        "tpot": [record.tpot for record in good if record.output_len > 1],
        "itl": [gap for record in good for gap in record.itl],
        "e2el": [record.latency for record in good],
    }
    of_each = {**times, "tpot": [record.tpot for record in good]}
    limits = [(of_each[name], limit / 1e3) for name, limit in limits_ms.items()]
    within = [all(values[i] <= limit for values, limit in limits) for i in range(len(good))]
    total_in, total_out = sum(r.prompt_len for r in good), sum(r.output_len for r in good)
    peak_tokens, peak_requests = _peaks(good)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(records) - len(good),
        "total_input_tokens": total_in,
        "total_output_tokens": total_out,
        "request_throughput": len(good) / duration,
        "request_goodput": sum(within) / duration if limits_ms else None,
        "output_throughput": total_out / duration,
        "total_token_throughput": (total_in + total_out) / duration,
        "input_lens": [record.prompt_len for record in records],
        "output_lens": [record.output_len for record in records],
        "ttfts": [record.ttft for record in records],
        "itls": [record.itl for record in records],
        "latencies": [record.latency for record in records],
        "start_times": [record.start for record in records],
        "queue_times": [record.queue_time for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [record.error for record in records],
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": peak_requests,
        "rtfx": 0.0,
    }
    for name, values in times.items():
        milliseconds = np.array(values or [0.0]) * 1e3
        result[f"mean_{name}_ms"] = float(milliseconds.mean())
        result[f"median_{name}_ms"] = float(np.median(milliseconds))
        result[f"std_{name}_ms"] = float(milliseconds.std())
        for p in percentiles:
            result[f"p{p:g}_{name}_ms"] = float(np.percentile(milliseconds, p))
    return result


def judged(records: Sequence[Record], limits_ms: Mapping[str, float]) -> dict[str, Any]:
    """Return keys of the result: were the limits met, by LoadGen's rule for Server tests.

    For each limit, LoadGen's early stopping allows a number of late requests. A failed request is late.
    """
    if not limits_ms:
        return {}
    times: dict[str, Callable[[Record], float]] = {
        "ttft": lambda one: one.ttft,
        "tpot": lambda one: one.tpot,
        "e2el": lambda one: one.latency,
    }
    late = {
        name: sum(bool(one.error) or times[name](one) > limit / 1e3 for one in records)
        for name, limit in limits_ms.items()
    }
    allowed = max(0, max_late(len(records), SERVER_PERCENTILE))
    met = all(count <= allowed for count in late.values())
    return {"limits_ms": dict(limits_ms), "late": late, "late_allowed": allowed, "limits_met": met}


def verdict_lines(result: Mapping[str, Any]) -> list[str]:
    """Return the lines of `judged`: the verdict, and a line for each limit; [] without limits."""
    if "limits_met" not in result:
        return []
    allowed, n = result["late_allowed"], result["completed"] + result["failed"]
    enough = queries_needed(SERVER_PERCENTILE) or 0
    few = f"; LoadGen requires at least {enough:,} requests" if n < enough else ""
    verdict = "met" if result["limits_met"] else "MISSED"
    lines = [f"Limits: {verdict} (late requests: at most {allowed:,} of {n:,}{few})"]
    for name, limit in result["limits_ms"].items():
        late = result["late"][name]
        outcome = "met" if late <= allowed else "missed"
        lines.append(f"  {_TITLES[name][0]} {limit:g} ms: {outcome}, {late:,} late")
    return lines


def _peaks(records: Sequence[Record]) -> tuple[float, int]:
    """Return the peak tokens per second, and the peak number of concurrent requests."""
    if not records:
        return 0.0, 0
    first = min(record.start for record in records)
    tokens = np.concatenate([r.start - first + r.ttft + np.cumsum([0.0, *r.itl]) for r in records])
    changes = [(record.start, 1) for record in records] + [(r.start + r.latency, -1) for r in records]
    running = np.cumsum([change for _, change in sorted(changes)])
    return float(np.bincount(tokens.astype(np.int64)).max()), int(running.max())


def table(
    result: Mapping[str, Any], percentiles: Sequence[float], rate: float | None, max_concurrency: int | None
) -> Iterator[str]:
    """Yield the lines of the table."""

    def line(name: str, value: float) -> str:
        return f"{name:<40} {value:<10.2f}" if isinstance(value, float) else f"{name:<40} {value:<10}"

    yield f"{' Serving Benchmark Result ':=^{_WIDTH}}"
    yield line("Successful requests:", result["completed"])
    yield line("Failed requests:", result["failed"])
    if max_concurrency is not None:
        yield line("Maximum request concurrency:", max_concurrency)
    if rate is not None:
        yield line("Request rate configured (RPS):", float(rate))
    yield line("Benchmark duration (s):", result["duration"])
    yield line("Total input tokens:", result["total_input_tokens"])
    yield line("Total generated tokens:", result["total_output_tokens"])
    yield line("Request throughput (req/s):", result["request_throughput"])
    if result["request_goodput"] is not None:
        yield line("Request goodput (req/s):", result["request_goodput"])
    yield line("Output token throughput (tok/s):", result["output_throughput"])
    yield line("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"])
    yield line("Peak concurrent requests:", result["max_concurrent_requests"])
    yield line("Total token throughput (tok/s):", result["total_token_throughput"])
    for name, (short, title) in _TITLES.items():
        yield f"{title:-^{_WIDTH}}"
        yield line(f"Mean {short} (ms):", result[f"mean_{name}_ms"])
        yield line(f"Median {short} (ms):", result[f"median_{name}_ms"])
        for p in percentiles:
            yield line(f"P{p:g} {short} (ms):", result[f"p{p:g}_{name}_ms"])
    yield "=" * _WIDTH
