"""``bench routing``: whole runs with dummy cores of zero cost: what remains is ours, and LoadGen's."""

from __future__ import annotations

import statistics
import sys
from typing import Any

from mpillm.bench.whole_runs import run_once
from mpillm.config.values import Values
from mpillm.fields import Field, positive, seconds
from mpillm.fields.topology import TopologyFields


class Options(Values):
    """Options of ``bench routing``."""

    n = Field("n", "ranks; harness, leader and two instances are 4", positive, default=4, group="benchmark")
    repeats = Field("repeats", "runs; the median is printed", positive, default=3, group="benchmark")
    offline_samples = Field(
        "offline_samples", "samples of an Offline run", positive, default=200_000, group="benchmark"
    )
    input_len = Field("input_len", "prompt tokens", positive, default=128, group="benchmark")
    output_len = Field("output_len", "answer tokens", positive, default=16, group="benchmark")
    qps = Field("qps", "queries per second of the Server run", positive, default=2000, group="benchmark")
    server_s = Field("server_s", "length of a Server run, seconds", seconds, default=8.0, group="benchmark")
    idle_s = Field(
        "idle_s",
        "how long to watch the idle ranks, seconds",
        seconds,
        default=5.0,
        group="benchmark",
    )
    mode = Field(
        "mode",
        "kind of instances",
        default="aggregated",
        choices=("aggregated", "disaggregated"),
        group="benchmark",
    )
    traffic_distribution_policy = Field(
        "traffic_distribution_policy",
        "which instance gets a request",
        default="load_balancing",
        choices=TopologyFields.traffic_distribution_policy.choices,
        group="benchmark",
    )


DESCRIPTION = "Measure the routing path with dummy cores of zero cost."
EPILOG = "example:\n  python -m mpillm bench routing -n 4 --qps 2000"


def main(config: Options) -> int:
    """Print the table; 0 unless a run failed."""
    data = ["--dataset", "synthetic", "--num_samples", "8192", "--input_mean", str(config.input_len)]
    data += ["--output_mean", str(config.output_len), "--max_output_len", str(config.output_len)]
    where = [
        "--core_type",
        "dummy",
        "--mode",
        config.mode,
        "--traffic_distribution_policy",
        config.traffic_distribution_policy,
    ]

    def runs(name: str, *options: str) -> list[dict[str, Any]]:
        results = []
        for i in range(config.repeats):
            print(f"  {name}, run {i + 1} of {config.repeats}", file=sys.stderr, flush=True)
            results.append(run_once(config.n, *where, *data, *options))
        return results

    offline = runs("Offline", "--min_query_count", str(config.offline_samples))
    rate = [
        "--server_target_qps",
        str(config.qps),
        "--min_query_count",
        str(int(config.qps * config.server_s)),
    ]
    server = runs("Server", "--scenarios", "Server", *rate)
    wait = ["--core_options", f"ttft_ms:{config.idle_s * 1000:g}"]
    idle = runs("idle ranks", "--scenarios", "SingleStream", "--min_query_count", "1", *wait)

    rows = [
        ("Offline", "samples/s", [r["samples_per_second"] for r in offline]),
        ("", "messages per request", [r["route"]["messages"] / r["samples"] for r in offline]),
        ("", "bytes per request, all hops", [r["route"]["message_bytes"] / r["samples"] for r in offline]),
        (f"Server at {config.qps}/s", "first-token latency p50, ms", [r["ttft_ms"]["p50"] for r in server]),
        ("", "first-token latency p99, ms", [r["ttft_ms"]["p99"] for r in server]),
        ("", "LoadGen VALID, runs", [float(sum(r["loadgen_result"] == "VALID" for r in server))]),
        ("", "messages per request", [r["route"]["messages"] / r["samples"] for r in server]),
        ("idle", "busiest rank, % of a core", [100 * max(r["cpu_cores"]) for r in idle]),
        ("start", "last rank's start to ready, s", [r["startup_s"] for r in [*offline, *server]]),
    ]
    print(
        f"{config.n} ranks, {config.mode}, {config.traffic_distribution_policy},"
        f" {config.input_len} tokens in, {config.output_len} out; median (least to most)"
    )
    for what, unit, values in rows:
        spread = f"({min(values):,.2f} to {max(values):,.2f})"
        print(f"  {what:<16} {unit:<30} {statistics.median(values):>12,.2f}  {spread}")
    return 0
