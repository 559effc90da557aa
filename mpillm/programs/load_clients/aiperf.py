"""NVIDIA's AIPerf. It sends complete bodies from mpillm, so its prompts are the data set's tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mpillm.files import write_json
from mpillm.programs.load_clients.kind import (
    LoadClientKind,
    LoadReport,
    LoadSpec,
    RequestRecord,
    body,
    milliseconds,
    read_lines,
    report_of,
    seed32,
)

_BODIES, _FOLDER = "aiperf-inputs.json", "aiperf"
_NS = 1e-9
_LATENCIES = {
    "ttft_ms": "time_to_first_token",
    "tpot_ms": "inter_token_latency",
    "latency_ms": "request_latency",
}
_PERCENTILES = {"mean": "avg", "p50": "p50", "p90": "p90", "p99": "p99"}


def _arguments(load: LoadSpec) -> Sequence[str]:
    if load.rate is not None:
        when = ["--request-rate", f"{load.rate:g}"]  # at random times by default
    else:
        when = ["--concurrency", str(load.max_open)]
    return (
        *("aiperf", "profile", "--model", load.model),
        *(word for url in load.urls for word in ("--url", url)),
        *("--endpoint-type", "completions", "--streaming"),
        *("--input-file", str(load.folder / _BODIES), "--custom-dataset-type", "inputs_json"),
        *("--request-count", str(len(load.order)), *when),
        *("--random-seed", str(seed32(load.seeds.arrivals))),
        *("--tokenizer", load.tokenizer or "builtin", "--use-server-token-count"),
        *("--ui", "simple", "--artifact-dir", str(load.folder / _FOLDER)),
        *load.args,
    )


def _write(load: LoadSpec) -> None:
    """Write the requests in the order in which they are sent, each in a separate session."""
    sessions = [
        {"session_id": str(place), "payloads": [body(load, load.samples[index])]}
        for place, index in enumerate(load.order)
    ]
    write_json(load.folder / _BODIES, {"data": sessions})


def _read(load: LoadSpec) -> LoadReport:
    folder = load.folder / _FOLDER
    report = report_of(folder / "profile_export_aiperf.json")
    problems = []
    if report.get("was_cancelled") or not report.get("is_complete", True):
        problems.append("its report says that it has not completed its run")
    rows = folder / "profile_export.jsonl"
    requests = [_request(load, row) for row in read_lines(rows, len(load.order))] if rows.exists() else []
    return LoadReport(
        str(report.get("aiperf_version", "")),
        int(_average(report, "request_count")),
        int(_average(report, "error_request_count")) or sum(bool(one.error) for one in requests),
        _average(report, "benchmark_duration"),
        _average(report, "total_output_tokens"),
        {
            name: milliseconds(report[key], 1.0, **_PERCENTILES)
            for name, key in _LATENCIES.items()
            if report.get(key)
        },
        tuple(problems),
        requests,
    )


def _average(report: Mapping[str, Any], name: str) -> float:
    return float((report.get(name) or {}).get("avg") or 0.0)


def _request(load: LoadSpec, row: Mapping[str, Any]) -> RequestRecord:
    about, metrics = row["metadata"], row.get("metrics") or {}

    def value(name: str) -> float:
        number = (metrics.get(name) or {}).get("value")
        return math.nan if number is None else float(number)

    issued, tokens = about["request_start_ns"] * _NS, value("output_sequence_length")
    lasted = value("request_latency") / 1e3  # the end of the last token, not of the connection
    ended = about["request_end_ns"] * _NS if math.isnan(lasted) else issued + lasted
    return RequestRecord(
        issued,
        issued + value("time_to_first_token") / 1e3,
        ended,
        int(load.order[int(about["conversation_id"])]),
        0 if math.isnan(tokens) else int(tokens),
        _error(row.get("error")),
    )


def _error(error: Any) -> str:
    if not error:
        return ""
    return (
        str(error.get("message") or error.get("type") or "failed") if isinstance(error, dict) else str(error)
    )


AIPERF = LoadClientKind(
    name="aiperf",
    arguments=_arguments,
    read=_read,
    write=_write,
    # Not HF_HUB_OFFLINE: with this, it treats a folder as the name of a model.
    environment={"DO_NOT_TRACK": "1"},
    many_urls=True,
    more_requests=lambda load: None if load.args else 0,
    install="pip install aiperf, or activate the environment that has it",
)
