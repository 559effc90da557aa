"""MLCommons' client, `inference-endpoint`, which the rules of MLPerf Endpoints require.

It is not on the package index. Install it from a copy of github.com/mlcommons/endpoints.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from launch.command import KnownFailure
from mpillm.files import as_written, read_object
from mpillm.programs.load_clients.kind import (
    LoadClientKind,
    LoadReport,
    LoadSpec,
    RequestRecord,
    milliseconds,
    read_lines,
    report_of,
    write_lines,
)

CONFIG = "inference-endpoint.yaml"
_PROMPTS = "prompts.jsonl"
_REPORT = "inference-endpoint"  # the folder
SUMMARY_LEFT = f"{_REPORT}/performance/result_summary.json"
"""Its files: the summary, and the configuration with all values."""
CONFIG_LEFT = f"{_REPORT}/config.yaml"
EVENTS = f"{_REPORT}/events.jsonl"
"""Its log of requests, with a line for each event."""
_NAME = "performance"
_NS = 1e-9
_MAX_WORKERS = 24  # the client's own limit
_START_S = 300.0  # for its processes, whose imports take seconds
_IS_CONFIG = re.compile(r"--config(=|$)|-c")
_PERCENTILES = {"mean": "avg", "p50": "50.0", "p90": "90.0", "p99": "99.0"}


def _arguments(load: LoadSpec) -> Sequence[str]:
    config(load)  # raises ValueError
    if second := next(filter(_IS_CONFIG.match, load.args), ""):
        raise ValueError(
            f"takes no second configuration (--harness_args {second}): mpillm writes its configuration"
            f" ({CONFIG}) from the run's options, such as --concurrency and --max_output_len"
        )
    command = ("inference-endpoint", "benchmark", "from-config", "--config", str(load.folder / CONFIG))
    return (*command, *load.args)


def config(load: LoadSpec) -> dict[str, Any]:
    """Return its configuration. Raises ValueError for unsupported values."""
    if load.sends_text:
        raise ValueError(
            "takes prompts as token ids: name the folder of the model's tokenizer with --model_path"
        )
    max_tokens = load.one_length()
    params: dict[str, Any] = {
        "name": load.model,
        "temperature": load.temperature,
        "top_p": load.top_p,
        "max_new_tokens": max_tokens,
        "streaming": "on",
    }
    if load.top_k:
        params["top_k"] = load.top_k
    # It has no ignore_eos; an equal minimum number of tokens has the same effect.
    params["min_new_tokens"] = max_tokens if load.ignores_stop() else min(max(load.min_tokens, 1), max_tokens)
    if load.tokenizer:
        params["tokenizer_name"] = load.tokenizer
    pattern: dict[str, Any] = {"type": "max_throughput"}
    if load.rate is not None:
        pattern = {"type": "poisson", "target_qps": load.rate}
    elif load.concurrency is not None:
        pattern = {"type": "concurrency", "target_concurrency": load.concurrency}
    return {
        "name": "mpillm",
        "type": "offline" if pattern["type"] == "max_throughput" else "online",
        "model_params": params,
        "datasets": [{"name": _NAME, "type": "performance", "path": str(load.folder / _PROMPTS)}],
        "settings": {
            "runtime": {
                "min_duration_ms": load.min_duration_ms,  # noted only: the number of requests is made for it
                "n_samples_to_issue": len(load.order),
                "scheduler_random_seed": load.seeds.arrivals,
                "dataloader_random_seed": load.seeds.samples,
            },
            "load_pattern": pattern,
            "client": {
                "num_workers": _workers(len(load.urls)),
                "worker_initialization_timeout": _START_S,
                "stream_all_chunks": load.all_chunks,
            },
        },
        "endpoint_config": {"endpoints": list(load.urls), "api_type": "openai_completions"},
        "report_dir": str(load.folder / _REPORT),
    }


def _workers(n_urls: int) -> int:
    """Return how many processes send requests, each URL by as many; its own number is 10 at least."""
    n_cores = min(len(os.sched_getaffinity(0)), _MAX_WORKERS)
    return n_urls * math.ceil(n_cores / n_urls)


def _write(load: LoadSpec) -> None:
    """Write its configuration and the data set, of which it draws samples by itself, with LoadGen's seeds."""
    write_lines(load.folder / _PROMPTS, ({"input_tokens": sample.tokens} for sample in load.samples))
    text = yaml.safe_dump(config(load), sort_keys=False)
    (load.folder / CONFIG).write_text(text, encoding="utf-8")


def _read(load: LoadSpec) -> LoadReport:
    report = report_of(load.folder / SUMMARY_LEFT)
    problems = []
    if not report.get("complete", True):
        problems.append(f"its report is not complete: state {report.get('state')}")
    lengths = report["output_sequence_lengths"]
    n_good = int(report["n_samples_completed"]) - int(report["n_samples_failed"])
    return LoadReport(
        " ".join(filter(None, (str(report["version"]), str(report.get("git_sha") or "")))),
        n_good,
        int(report["n_samples_failed"]),
        (report["duration_ns"] or 0) * _NS,
        lengths.get("total"),
        {
            name: _statistics(statistics)
            for name, key in (("ttft_ms", "ttft"), ("tpot_ms", "tpot"), ("latency_ms", "latency"))
            if (statistics := report[key]).get("percentiles")
        },
        tuple(problems),
        *_requests(load, n_good),
    )


def named_percentiles(percentiles: Mapping[str, Any]) -> dict[str, Any]:
    """Return percentiles with names such as "99.0", which some versions of the client write as "99"."""
    return {f"{name}.0": value for name, value in percentiles.items()} | {**percentiles}


def _statistics(statistics: Mapping[str, Any]) -> dict[str, float]:
    """Return statistics in milliseconds. Without streaming, it may record the end before the first token."""
    named = {**statistics, **named_percentiles(statistics["percentiles"])}
    figures = milliseconds(named, 1e-6, **_PERCENTILES)
    return {name: max(figure, 0.0) for name, figure in figures.items()}


def _requests(load: LoadSpec, n_good: int) -> tuple[list[RequestRecord], int]:
    """Return the outcome of each request from the client's log of events; empty without a log.

    Also return the number of answers whose tokens are counted from text. `n_good`: all answers.
    """
    if not (load.folder / EVENTS).exists():
        return [], n_good
    samples = _samples(load.folder)
    issued: dict[str, float] = {}
    first: dict[str, float] = {}
    errors: dict[str, str] = {}
    records, n_counted = [], 0
    n_chunks = max(load.lengths) if load.all_chunks else 0
    for event in read_lines(load.folder / EVENTS, len(load.order), n_chunks):
        kind, one, at = event["event_type"], event["sample_uuid"], event["timestamp_ns"] * _NS
        if one not in samples:
            continue
        if kind == "sample.issued":
            issued[one] = at
        elif kind == "sample.recv_first":
            first[one] = at
        elif kind.startswith("error."):
            errors[one] = str(event["data"])
        elif kind == "sample.complete" and one in issued:
            sample = samples[one]
            tokens = _tokens(load, sample, event)
            n_counted += one not in errors and event.get("finish_reason") != "length"
            records.append(
                RequestRecord(
                    issued[one], min(first.get(one, math.nan), at), at, sample, tokens, errors.get(one, "")
                )
            )
    return records, n_counted


def _samples(folder: Path) -> dict[str, int]:
    """Return the sample of each request."""
    samples: dict[str, int] = read_object(folder / _REPORT / "sample_idx_map.json").get(_NAME, {})
    return samples


def _answers(folder: Path, n_requests: int) -> dict[int, str]:
    """Return the texts of all responses; a failed request has none."""
    texts, failed = {}, set()
    with as_written(folder / EVENTS):
        samples = _samples(folder)
        for event in read_lines(folder / EVENTS, n_requests):
            if (sample := samples.get(event["sample_uuid"])) is None:
                continue
            if event["event_type"] == "sample.complete":
                texts[sample] = text_of(event.get("data"))
            elif event["event_type"].startswith("error."):
                failed.add(sample)
    return {sample: text for sample, text in texts.items() if sample not in failed}


def _tokens(load: LoadSpec, sample: int, event: Mapping[str, Any]) -> int:
    """Return the number of tokens of a response: the client stores only its text."""
    if event.get("finish_reason") == "length":
        return load.lengths[sample]
    return load.count_tokens(text_of(event.get("data")))


def text_of(data: Any) -> str:
    """Return a response's text. For a stream, the client stores the first piece and the other pieces."""
    if not isinstance(data, list) or len(data) < 2 or data[0] != "TextModelOutput":
        return ""
    return "".join(data[1]) if isinstance(data[1], list) else str(data[1] or "")


INFERENCE_ENDPOINT = LoadClientKind(
    name="inference-endpoint",
    arguments=_arguments,
    read=_read,
    write=_write,
    environment={"HF_HUB_OFFLINE": "1"},  # all required files are local
    answers=_answers,
    many_urls=True,
    more_requests=lambda load: None if load.args else 0,
    install="install it from a copy of github.com/mlcommons/endpoints (Python 3.12), and have it in PATH",
    failures=(
        KnownFailure(r"Config error:", "it does not take its configuration", f"look at {CONFIG}"),
        KnownFailure(
            r"Workers failed to initialize within",
            "its processes took too long to start",
            "something else uses the cores of this host",
        ),
    ),
)
