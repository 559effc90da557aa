"""``bench routing``: runs with dummy cores that compute nothing measure the cost of mpillm and LoadGen."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from disagg.errors import ConfigError
from mpillm.options import json_output
from mpillm.options.field import option
from mpillm.options.fields.topology import TopologyFields
from mpillm.options.parsers import integers, positive, seconds
from mpillm.options.values import Values
from mpillm.runtime.whole_runs import run_once


class Options(Values, group="benchmark"):
    """Options of ``bench routing``."""

    n = option("ranks", positive, default=3)
    control_ranks = TopologyFields.control_ranks.but(
        "how many of them compute nothing: harness and leader on one rank, or on two",
        default=1,
        group="benchmark",
    )
    repeats = option("runs; the median is printed", positive, default=3)
    offline_samples = option("samples of an Offline run", positive, default=200_000)
    input_len = option("prompt tokens", positive, default=128)
    output_len = option("answer tokens", positive, default=16)
    qps = option("queries per second of the Server runs, separated by commas", integers, default=(200, 2000))
    server_s = option("length of a Server run, seconds", seconds, default=8.0)
    idle_s = option("how long to watch the idle ranks, seconds", seconds, default=5.0)
    mode = TopologyFields.mode.but("kind of instances", default="aggregated", group="benchmark")
    traffic_distribution_policy = TopologyFields.traffic_distribution_policy.but(
        "which instance gets a request",
        default="load_balancing",
        choices=TopologyFields.traffic_distribution_policy.choices,
        group="benchmark",
    )


_DEADLINE_S = 600.0  # of a baseline

DESCRIPTION = "Measure the routing path with dummy cores of zero cost."
EPILOG = "example:\n  python -m mpillm bench routing -n 4 --control_ranks 2 --qps 200,2000"


def _child(module: str, *args: str) -> list[float]:
    """Return the numbers that a program of this package prints. Raises ConfigError if it fails."""
    command = [sys.executable, "-m", f"mpillm.experiments.bench.{module}", *args]
    try:
        ended = subprocess.run(command, capture_output=True, check=False, text=True, timeout=_DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{module}: no result within {_DEADLINE_S:g} s") from None
    if ended.returncode:
        why = ended.stderr.strip().rpartition("\n")[2] or "no output"
        raise ConfigError(f"{module}: exit code {ended.returncode}: {why}")
    return [float(word) for word in ended.stdout.split()]


def main(
    config: Options,
    run_once: Callable[..., dict[str, Any]] = run_once,
    child: Callable[..., list[float]] = _child,
) -> int:
    """Print the table; 0 unless a run failed. `run_once` starts a run, `child` a baseline."""
    data = ["--dataset", "synthetic", "--num_samples", "8192", "--input_mean", str(config.input_len)]
    data += ["--output_mean", str(config.output_len), "--max_output_len", str(config.output_len)]
    where = [
        "--core_type",
        "dummy",
        "--mode",
        config.mode,
        "--traffic_distribution_policy",
        config.traffic_distribution_policy,
        "--control_ranks",
        str(config.control_ranks),
    ]

    def run(*options: str) -> dict[str, Any]:
        return run_once(config.n, *where, *data, *options)

    lost: list[str] = []  # errors of failed baselines

    def baseline(n: int, module: str, *args: str) -> list[float]:
        """Return the `n` numbers of a baseline; NaN if it fails, so that the runs' figures remain."""
        try:
            return child(module, *args)
        except ConfigError as error:
            lost.append(str(error))
            return [math.nan] * n

    def report_progress(test: str, i: int) -> None:
        print(f"  {test}, {i + 1} of {config.repeats}", file=sys.stderr, flush=True)

    lengths = (str(config.input_len), str(config.output_len))
    offline: list[dict[str, Any]] = []
    ceilings: dict[str, list[float]] = {"plain": [], "fast": []}
    for i in range(config.repeats):
        report_progress("Offline", i)
        offline.append(run("--min_query_count", str(config.offline_samples)))
        for sut, ceiling in ceilings.items():
            ceiling.extend(baseline(1, "empty_system", str(config.offline_samples), lengths[1], sut))
    rates = [r["samples_per_second"] for r in offline]
    rows = [
        ("Offline", "samples/s", rates),
        ("", "LoadGen alone, samples/s", ceilings["plain"]),
        ("", "part of LoadGen alone", _ratios(rates, ceilings["plain"])),
        ("", "LoadGen's fast SUT alone", ceilings["fast"]),
        ("", "part of LoadGen's fast SUT", _ratios(rates, ceilings["fast"])),
        ("", "messages per request", [r["route"]["messages"] / r["samples"] for r in offline]),
        ("", "bytes per request, all hops", [r["route"]["message_bytes"] / r["samples"] for r in offline]),
    ]
    starts = [r["startup_s"] for r in offline]
    for qps in config.qps:
        server, others = [], []
        n = str(int(qps * config.server_s))
        for i in range(config.repeats):
            report_progress(f"Server at {qps}/s", i)
            server.append(
                run("--scenarios", "Server", "--server_target_qps", str(qps), "--min_query_count", n)
            )
            others.append(baseline(2, "aiohttp_pair", str(qps), n, *lengths))
        starts += [r["startup_s"] for r in server]
        rows += [
            (f"Server at {qps}/s", "LoadGen VALID, runs", [float(sum(map(_is_valid, server)))]),
        ]
        for j, name in enumerate(("p50", "p99")):
            ttfts, latencies = [r["ttft_ms"][name] for r in server], [other[j] for other in others]
            rows += [
                ("", f"first-token latency {name}, ms", ttfts),
                ("", f"aiohttp's latency {name}, ms", latencies),
                ("", f"part of aiohttp's {name}", _ratios(ttfts, latencies)),
            ]
        cpu_us = [1e6 * r["cpu_cores"][0] / qps for r in server]
        rows += [
            ("", "harness, µs of CPU per query", cpu_us),
            ("", "all ranks, µs of CPU per query", [1e6 * sum(r["cpu_cores"]) / qps for r in server]),
            ("", "messages per request", [r["route"]["messages"] / r["samples"] for r in server]),
        ]
    idle = []
    for i in range(config.repeats):
        report_progress("idle ranks", i)
        wait = f"ttft_ms:{config.idle_s * 1000:g}"
        idle.append(run("--scenarios", "SingleStream", "--min_query_count", "1", "--core_options", wait))
    rows += [
        ("idle", "busiest rank, % of a core", [100 * max(r["cpu_cores"][1:], default=0.0) for r in idle]),
        ("", "harness with LoadGen, % of a core", [100 * r["cpu_cores"][0] for r in idle]),
        ("start", "last rank's start to ready, s", starts),
    ]
    figures: list[dict[str, Any]] = []
    for test, unit, values in rows:  # a test is named in its first row
        known = [None if math.isnan(value) else value for value in values]
        figures.append({"test": test or figures[-1]["test"], "figure": unit, "values": known})
    json_output.set_figures(figures)
    print(
        f"{config.n} ranks, {config.control_ranks} of them control, {config.mode},"
        f" {config.traffic_distribution_policy}, {config.input_len} tokens in, {config.output_len} out;"
        " median (least to most)"
    )
    for test, unit, values in rows:
        print(f"  {test:<16} {unit:<30} {_median_and_spread(values)}")
    for reason in dict.fromkeys(lost):
        print(f"  not measured: {reason}")
    return 0


def _median_and_spread(values: list[float]) -> str:
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return f"{'-':>12}"
    return f"{statistics.median(known):>12,.2f}  ({min(known):,.2f} to {max(known):,.2f})"


def _is_valid(result: dict[str, Any]) -> bool:
    return bool(result["loadgen_result"] == "VALID")


def _ratios(values: list[float], baselines: list[float]) -> list[float]:
    """Return ratios within rounds, in which a noisy machine disturbs both."""
    return [value / baseline for value, baseline in zip(values, baselines, strict=True)]
