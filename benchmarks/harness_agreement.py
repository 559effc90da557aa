"""``benchmarks harness-agreement``: how far another client's figures are from LoadGen's and ours."""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from typing import Any, NamedTuple

from benchmarks.endpoints import load_test, served
from mpillm.options.field import Field
from mpillm.options.fields.model import ModelFields
from mpillm.options.parsers import positive
from mpillm.options.values import Values
from mpillm.runtime.whole_runs import run_once


class Options(Values):
    """Options of ``benchmarks harness-agreement``."""

    harness = Field("harness", "the client", default="inference-endpoint", group="benchmark")
    model_path = ModelFields.model_path.but("a folder with a tokenizer", group="benchmark")
    repeats = Field("repeats", "of all, in turn", positive, default=3, group="benchmark")
    requests = Field("requests", "of each test", positive, default=200, group="benchmark")
    output_len = Field("output_len", "answer tokens", positive, default=32, group="benchmark")
    qps = Field("qps", "queries per second, at random times", positive, default=20, group="benchmark")
    concurrency = Field("concurrency", "requests at once", positive, default=8, group="benchmark")
    core_options = Field(
        "core_options", "the server's pace", default="ttft_ms:20,tpot_ms:10", group="benchmark"
    )


DESCRIPTION = (
    "Compare what another client measures of a server of known pace with LoadGen's figures and ours."
)
EPILOG = "example:\n  python -m benchmarks harness-agreement --model_path build/models/smollm2-135m"
_FIGURES = ("first token", "per token", "whole answer")


class _Row(NamedTuple):
    load: str
    figure: str  # p50, ms; or requests/s
    client: str


def main(config: Options) -> int:
    """Print the figures of each client, and how far the other client's are from ours."""
    found: dict[_Row, list[float]] = defaultdict(list)
    with served(2, *_words(core_type="dummy", max_batch_size=1024, core_options=config.core_options)) as url:
        for i in range(config.repeats):
            for load, theirs, ours in _loads(config):
                print(f"{load}, {i + 1} of {config.repeats}", file=sys.stderr, flush=True)
                for client, figures in (
                    (config.harness, _run(config, url, "--harness", config.harness, *theirs)),
                    *((name, _ours(config, url, name, words)) for name, words in ours.items()),
                ):
                    for figure, value in figures.items():
                        found[_Row(load, figure, client)].append(value)
    print(f"a server with {config.core_options}, {config.output_len} tokens; medians of {config.repeats}")
    for row, values in found.items():
        other = statistics.median(found[row._replace(client=config.harness)])
        value = statistics.median(values)
        apart = "" if row.client == config.harness else f"{other - value:+10.2f} ({other / value - 1:+.1%})"
        print(f"  {row.load:<12} {row.figure:<14} {row.client:<20} {value:>9.2f} {apart}")
    return 0


def _loads(config: Options) -> list[tuple[str, list[str], dict[str, list[str]]]]:
    """Return each load: its name, the other client's words, and those of ours by the name of the client."""
    rate = _words(scenarios="Server", server_target_qps=config.qps)
    return [
        ("all at once", [], {"bench endpoint": []}),
        ("Poisson", rate, {"LoadGen": rate, "bench endpoint": _words(request_rate=config.qps)}),
        (
            "concurrency",
            _words(concurrency=config.concurrency),
            {"bench endpoint": _words(max_concurrency=config.concurrency)},
        ),
    ]


def _run(config: Options, url: str, *words: str) -> dict[str, float]:
    """Return the p50 that a run has of its client's records, ms, and its rate."""
    n, length = config.requests, config.output_len
    data = _words(dataset="synthetic", num_samples=n, input_mean=32, output_mean=length)
    data += _words(max_output_len=length)
    root = url.removeprefix("http://").removesuffix("/v1")
    server = _words(core_type="trtllm_endpoint", trtllm_server_urls=root, model_path=config.model_path)
    made = run_once(2, *server, *data, *_words(min_query_count=n, min_duration=0), *words)
    whole = made["harness"]["latency_ms"] if "harness" in made else made["latency_ms"]
    latencies = (made["ttft_ms"], made["tpot_ms"], whole)
    return _named([one["p50"] if one else 0.0 for one in latencies], made["samples_per_second"])


def _ours(config: Options, url: str, name: str, words: list[str]) -> dict[str, float]:
    if name == "LoadGen":
        return _run(config, url, *words)
    load = _words(num_prompts=config.requests, input_len=32, output_len=config.output_len)
    made = load_test(url, *load, *_words(model_path=config.model_path), *words)
    medians = [made[f"median_{latency}_ms"] for latency in ("ttft", "tpot", "e2el")]
    return _named(medians, made["request_throughput"])


def _named(latencies: list[float], rate: float) -> dict[str, float]:
    return {**dict(zip(_FIGURES, latencies, strict=True)), "requests/s": rate}


def _words(**options: Any) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]
