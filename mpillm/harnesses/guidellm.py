"""GuideLLM. It sends prompts as text, and spreads them over one server only."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mpillm.harnesses.kind import (
    HarnessKind,
    Load,
    Measured,
    Request,
    milliseconds,
    report_of,
    sampling,
    seed32,
    write_lines,
)

_PROMPTS, _REPORT = "guidellm-prompts.jsonl", "guidellm.json"
_LATENCIES = {
    "ttft_ms": ("time_to_first_token_ms", 1.0),
    "tpot_ms": ("inter_token_latency_ms", 1.0),
    "latency_ms": ("request_latency", 1e3),
}


def _words(load: Load) -> Sequence[str]:
    if load.rate is not None:
        profile: dict[str, Any] = {"kind": "poisson", "rate": load.rate}
    elif load.concurrency is not None:
        profile = {"kind": "concurrent", "streams": load.concurrency}
    else:
        profile = {"kind": "throughput", "max_concurrency": len(load.order)}
    # A number of tokens in the data set would mean that the end of an answer is ignored.
    of_data = load.ignores_stop()
    asked = sampling(load) | ({"min_tokens": load.shortest} if load.shortest else {})
    backend = {
        "kind": "openai_http",
        "target": load.urls[0],
        "model": load.model,
        "request_format": "/v1/completions",
        "stream": True,
        "extras": {"body": asked},
    }
    if not of_data:
        backend["max_tokens"] = load.one_length()
    return (
        *("guidellm", "run", "--disable-console-interactive", "--backend", json.dumps(backend)),
        *("--profile", json.dumps(profile)),
        *("--constraint", json.dumps({"kind": "max_requests", "count": len(load.order)})),
        *("--tokenizer", json.dumps({"kind": "hf_auto", "model": load.tokenizer})),
        *("--data", json.dumps({"kind": "json_file", "path": str(load.folder / _PROMPTS)})),
        *("--seed", json.dumps({"kind": "static", "value": seed32(load.seeds.arrivals)})),
        *("--output", json.dumps({"kind": "json", "path": str(load.folder / _REPORT)})),
    )


def _write(load: Load) -> None:
    """Write the prompts in the order in which they are sent."""
    of_data = load.ignores_stop()
    rows = (load.samples[index] for index in load.order)
    write_lines(
        load.folder / _PROMPTS,
        ({"prompt": row.text} | ({"output_tokens_count": row.longest} if of_data else {}) for row in rows),
    )


def _read(load: Load) -> Measured:
    report = report_of(load.folder / _REPORT)
    (benchmark,) = report["benchmarks"]
    metrics, totals = benchmark["metrics"], benchmark["metrics"]["request_totals"]
    problems = [f"{n} requests were not completed"] if (n := totals["incomplete"]) else []
    return Measured(
        str(report.get("metadata", {}).get("guidellm_version", "")),
        int(totals["successful"]),
        int(totals["errored"]),
        float(benchmark["duration"]),
        metrics["output_token_count"]["successful"]["total_sum"],
        {
            ours: _statistics(metrics[theirs]["successful"], factor)
            for ours, (theirs, factor) in _LATENCIES.items()
        },
        tuple(problems),
        _requests(load, benchmark["requests"]),
    )


def _statistics(found: Mapping[str, Any], factor: float) -> dict[str, float]:
    named = {**found, **found["percentiles"]}
    return milliseconds(named, factor, mean="mean", p50="p50", p90="p90", p99="p99")


def _requests(load: Load, found: Mapping[str, Any]) -> list[Request]:
    """Return what became of each request; which sample it was, their order says."""
    rows = [row for kind in ("successful", "errored") for row in found.get(kind) or ()]
    rows = [row for row in rows if row.get("request_start_time") is not None]
    rows.sort(key=lambda row: row["request_start_time"])
    return [_request(row, load.order[min(place, len(load.order) - 1)]) for place, row in enumerate(rows)]


def _request(row: Mapping[str, Any], sample: int) -> Request:
    issued, first = row["request_start_time"], row.get("time_to_first_token_ms")
    return Request(
        issued,
        math.nan if first is None else issued + first / 1e3,
        row["request_end_time"],
        sample,
        int(row.get("output_tokens") or 0),
        str(row["info"].get("error") or ""),
    )


GUIDELLM = HarnessKind(
    "guidellm",
    _words,
    _read,
    _write,
    environment={"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"},
    needs_tokenizer=True,
    install="pip install guidellm, or activate the environment that has it",
)
