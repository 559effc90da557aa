"""GuideLLM. It sends prompts as text, to one server.

Its warm-up is part of its profile, which mpillm writes. So mpillm reads `--warmup N` in --harness_args: N
additional requests before and during the first ones of the test, which no figure includes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from launch.safe_text import whole_number
from mpillm.programs.load_clients.kind import (
    LoadClientKind,
    LoadReport,
    LoadSpec,
    RequestRecord,
    milliseconds,
    report_of,
    sampling,
    seed32,
    write_lines,
)

_MAX_WARMUP = 1_000_000
_PROMPTS, _REPORT = "guidellm-prompts.jsonl", "guidellm.json"
_LATENCIES = {
    "ttft_ms": ("time_to_first_token_ms", 1.0),
    "tpot_ms": ("inter_token_latency_ms", 1.0),
    "latency_ms": ("request_latency", 1e3),
}


def _warmup(load: LoadSpec) -> tuple[int, tuple[str, ...]]:
    """Return the requests of the warm-up, and the other arguments of --harness_args.

    Raises ValueError for a wrong number, and for a second profile, which would replace the load's profile.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--warmup", default="0")
    parser.add_argument("--profile")
    try:
        own, others = parser.parse_known_args(load.args)
    except argparse.ArgumentError as error:
        raise ValueError(f"--harness_args: {error}") from None
    if own.profile is not None:
        raise ValueError(
            "takes no second profile (--harness_args --profile): mpillm writes its profile from the run's"
            " options, such as --concurrency; for a warm-up of N requests: --harness_args '--warmup N'"
        )
    warmup = whole_number(own.warmup)
    if warmup is None or warmup > _MAX_WARMUP:
        raise ValueError(
            f"--harness_args --warmup {own.warmup}: expected a number of requests, up to {_MAX_WARMUP:,}"
        )
    return warmup, tuple(others)


def _order(load: LoadSpec) -> list[int]:
    """Return the samples in the order in which they are sent, beginning with the warm-up.

    The warm-up uses samples that the test does not send, if there are any: a server may cache prompts.
    """
    n, tested = _warmup(load)[0], {*load.order}
    others = [index for index in range(len(load.samples)) if index not in tested] or [*reversed(load.order)]
    return [*itertools.islice(itertools.cycle(others), n), *load.order]


def _arguments(load: LoadSpec) -> Sequence[str]:
    if load.rate is not None:
        profile: dict[str, Any] = {"kind": "poisson", "rate": load.rate}
    elif load.concurrency is not None:
        profile = {"kind": "concurrent", "streams": load.concurrency}
    else:
        profile = {"kind": "throughput", "max_concurrency": len(load.order)}
    n_warmup, args = _warmup(load)
    if n_warmup:
        profile["warmup"] = {"mode": "requests", "value": n_warmup}
    # A number of tokens in the data set would mean that the end of an answer is ignored.
    of_data = load.ignores_stop()
    body = sampling(load) | ({"min_tokens": load.min_tokens} if load.min_tokens else {})
    backend = {
        "kind": "openai_http",
        "target": load.urls[0],
        "model": load.model,
        "request_format": "/v1/completions",
        "stream": True,
        "extras": {"body": body},
    }
    if not of_data:
        backend["max_tokens"] = load.one_length()
    return (
        *("guidellm", "run", "--disable-console-interactive", "--backend", json.dumps(backend)),
        *("--profile", json.dumps(profile)),
        *("--constraint", json.dumps({"kind": "max_requests", "count": n_warmup + len(load.order)})),
        *("--tokenizer", json.dumps({"kind": "hf_auto", "model": load.tokenizer})),
        *("--data", json.dumps({"kind": "json_file", "path": str(load.folder / _PROMPTS)})),
        *("--seed", json.dumps({"kind": "static", "value": seed32(load.seeds.arrivals)})),
        *("--output", json.dumps({"kind": "json", "path": str(load.folder / _REPORT)})),
        *args,
    )


def _write(load: LoadSpec) -> None:
    """Write the prompts in the order in which they are sent."""
    of_data = load.ignores_stop()
    rows = (load.samples[index] for index in _order(load))
    write_lines(
        load.folder / _PROMPTS,
        ({"prompt": row.text} | ({"output_tokens_count": row.max_tokens} if of_data else {}) for row in rows),
    )


def _more_requests(load: LoadSpec) -> int | None:
    n_warmup, args = _warmup(load)
    return None if args else n_warmup


def _read(load: LoadSpec) -> LoadReport:
    report = report_of(load.folder / _REPORT)
    (benchmark,) = report["benchmarks"]
    metrics, totals = benchmark["metrics"], benchmark["metrics"]["request_totals"]
    problems = [f"{n} requests were not completed"] if (n := totals["incomplete"]) else []
    completed, failed = int(totals["successful"]), int(totals["errored"])
    tokens = metrics["output_token_count"]["successful"]["total_sum"]
    requests = _requests(load, benchmark["requests"])
    if _warmup(load)[0]:  # its sums are of a time span, which truncates requests
        good = [one for one in requests if not one.error]
        completed, failed = len(good), len(requests) - len(good)
        tokens = sum(one.tokens for one in good)
    return LoadReport(
        str(report.get("metadata", {}).get("guidellm_version", "")),
        completed,
        failed,
        float(benchmark["duration"]),
        tokens,
        {name: _statistics(metrics[key]["successful"], factor) for name, (key, factor) in _LATENCIES.items()},
        tuple(problems),
        requests,
        0 if load.gives_usage else completed,
    )


def _statistics(statistics: Mapping[str, Any], factor: float) -> dict[str, float]:
    named = {**statistics, **statistics["percentiles"]}
    return milliseconds(named, factor, mean="mean", p50="p50", p90="p90", p99="p99")


def _requests(load: LoadSpec, by_outcome: Mapping[str, Any]) -> list[RequestRecord]:
    """Return the outcome of each request after the warm-up; the order of the starts gives the samples."""
    order, n_warmup = _order(load), _warmup(load)[0]
    rows = [row for kind in ("successful", "errored") for row in by_outcome.get(kind) or ()]
    rows = [row for row in rows if row.get("request_start_time") is not None]
    rows.sort(key=lambda row: row["request_start_time"])
    sent = [_request(row, order[min(place, len(order) - 1)]) for place, row in enumerate(rows)]
    return sent[n_warmup:]


def _request(row: Mapping[str, Any], sample: int) -> RequestRecord:
    issued, first = row["request_start_time"], row.get("time_to_first_token_ms")
    return RequestRecord(
        issued,
        math.nan if first is None else issued + first / 1e3,
        row["request_end_time"],
        sample,
        int(row.get("output_tokens") or 0),
        str(row["info"].get("error") or ""),
    )


GUIDELLM = LoadClientKind(
    name="guidellm",
    arguments=_arguments,
    read=_read,
    write=_write,
    environment={"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"},
    needs_tokenizer=True,
    needs_usage=True,
    more_requests=_more_requests,
    install="pip install guidellm, or activate the environment that has it",
)
