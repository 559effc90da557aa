"""Report of ``bench core-model``: the table of benchmark_core_model.py, and its statistics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mpillm.experiments.loadtest.load_test import Record

PERCENTILES = (50, 90, 99)


def statistics_of(records: Sequence[Record]) -> dict[str, Any]:
    """Return statistics, times in ms: `latency`, `ttft` and `itl` each with a mean and percentiles.

    Failed requests only count in `errors`.
    """
    good = [record for record in records if not record.error]
    if not good:
        return {"errors": len(records), "requests": 0}
    begin, end = min(r.start for r in good), max(r.start + r.latency for r in good)
    total_s = max(end - begin, 1e-9)
    times = {
        "latency": [record.latency for record in good],
        "ttft": [record.ttft for record in good],
        "itl": [gap for record in good for gap in record.itl],
    }
    return {
        "requests": len(good),
        "errors": len(records) - len(good),
        "requests_per_second": len(good) / total_s,
        "tokens_per_second": sum(record.output_len for record in good) / total_s,
        "input_tokens": float(np.mean([record.prompt_len for record in good])),
        "output_tokens": float(np.mean([record.output_len for record in good])),
        "total_ms": 1e3 * total_s,
        "sum_ms": 1e3 * sum(times["latency"]),
        **{name: _spread(values) for name, values in times.items() if values},
    }


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    values = 1e3 * np.array(seconds)
    percentiles = {f"p{p}": float(np.percentile(values, p, method="inverted_cdf")) for p in PERCENTILES}
    return {"mean": float(values.mean()), **percentiles}


def table(stats: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the report."""
    rows = {
        "Requests/Sec": stats["requests_per_second"],
        "OP tokens/sec": stats["tokens_per_second"],
    }
    if latency := stats.get("latency"):
        rows |= {
            "Avg. latency (ms)": latency["mean"],
            "P99 latency (ms)": latency["p99"],
            "P90 latency (ms)": latency["p90"],
        }
    rows |= {
        "Avg. IP tokens per request": stats["input_tokens"],
        "Avg. OP tokens per request": stats["output_tokens"],
        "Total latency (ms)": stats["total_ms"],
        "Total requests": stats["requests"],
    }
    yield from _box({"Stat": "Value", **{name: f"{value:.2f}" for name, value in rows.items()}})
    for name, title in (
        ("latency", "latency"),
        ("ttft", "time to first token"),
        ("itl", "inter-token latency"),
    ):
        if name in stats:
            spread = "  ".join(f"P{p} {stats[name][f'p{p}']:.2f}" for p in PERCENTILES)
            yield f"{title + ', ms:':<24} mean {stats[name]['mean']:.2f}  {spread}"
    if stats["errors"]:
        yield f"errors: {stats['errors']}"


def _box(rows: Mapping[str, str]) -> Iterator[str]:
    wide, narrow = max(map(len, rows)) + 2, max(map(len, rows.values())) + 2
    edge = f"+{'-' * wide}+{'-' * narrow}+"
    yield edge
    for number, (name, value) in enumerate(rows.items()):
        yield f"|{name:^{wide}}|{value:^{narrow}}|"
        if number == 0:
            yield edge
    yield edge
