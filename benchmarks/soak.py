"""``benchmarks soak``: a long test through dummy cores of zero cost, and what each rank gains in it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError
from launch.default_paths import RUNS
from mpillm.options.field import Field
from mpillm.options.fields.results import OutputFields
from mpillm.options.fields.topology import TopologyFields
from mpillm.options.parsers import positive, seconds
from mpillm.options.values import Values
from mpillm.runtime.whole_runs import run_in

_SETTLED = 0.1  # of the test: by then every rank has had all kinds of work
_MOST_LOOKS = 600  # whose pairs are compared
_MB = 1e6


class Options(Values):
    """Options of ``benchmarks soak``."""

    n = Field("n", "ranks; harness, leader and two instances are 4", positive, default=4, group="benchmark")
    scenarios = Field(
        "scenarios", "kind of test", default="Server", choices=("Server", "Offline"), group="benchmark"
    )
    duration = Field(
        "duration", "length of a Server test, seconds", seconds, default=3600.0, group="benchmark"
    )
    qps = Field("qps", "queries per second of a Server test", positive, default=300, group="benchmark")
    samples = Field("samples", "samples of an Offline test", positive, default=10_000_000, group="benchmark")
    mode = TopologyFields.mode.but("kind of instances", default="aggregated", group="benchmark")
    log_dir = OutputFields.log_dir.but(
        "run directory, which stays", default=f"{RUNS}/soak", group="benchmark"
    )


DESCRIPTION = (
    "Run a long test through dummy cores of zero cost, and say what each rank gains in it: memory, threads,"
    " file descriptors. They are looked at up to twice a second, from a tenth of the test on."
)
EPILOG = "example:\n  python -m benchmarks soak --scenarios Offline --samples 10000000"


class Gain(NamedTuple):
    """What one rank gains while a test goes on."""

    looks: int
    first_mb: float
    last_mb: float
    bytes_per_sample: float  # median of the slopes between all pairs of looks (Theil and Sen)
    bytes_per_hour: float
    threads: float  # those of the last look without those of the first
    open_files: float


def main(config: Options) -> int:
    """Print the table; 0 unless the run failed."""
    words = ["--core_type", "dummy", "--mode", config.mode, "--scenarios", config.scenarios]
    words += ["--dataset", "synthetic", "--num_samples", "8192", "--input_mean", "128", "--output_mean", "16"]
    words += ["--max_output_len", "16"]
    if config.scenarios == "Server":
        words += ["--server_target_qps", str(config.qps), "--min_duration", str(config.duration)]
        words += ["--min_query_count", str(max(1, int(config.qps * config.duration)))]
    else:
        words += ["--min_query_count", str(config.samples)]
    folder = Path(config.log_dir)
    print(f"the run's output goes to {folder / 'console.txt'}", file=sys.stderr, flush=True)
    ended = run_in(folder, ("-n", str(config.n)), words)
    if ended.failure:
        raise ConfigError(f"the run failed: {ended.failure}")
    telemetry = json.loads((folder / "telemetry.json").read_text(encoding="utf-8"))
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    result = ended.result
    print(
        f"{config.scenarios}, {result['samples']:,} samples in {result['test_s']:,.0f} s,"
        f" {config.n} ranks, {config.mode}: LoadGen {result['status']}"
    )
    print(_row("rank", "", "looks", "first, MB", "last, MB", "bytes/sample", "MB/hour", "threads", "files"))
    for rank in plan["ranks"]:
        found = gain(telemetry, rank["rank"])
        print(
            _row(
                *(rank["rank"], "+".join(rank["roles"]), found.looks),
                *(f"{found.first_mb:,.1f}", f"{found.last_mb:,.1f}", f"{found.bytes_per_sample:.3f}"),
                *(f"{found.bytes_per_hour / _MB:.3f}", f"{found.threads:+.0f}", f"{found.open_files:+.0f}"),
            )
        )
    if config.scenarios == "Offline":
        print("8 bytes per sample of the harness are LoadGen's: its list of latencies")
    return 0


def _row(rank: object, role: str, *cells: object) -> str:
    return f"  {rank:>4} {role:<16}" + "".join(f"{cell:>13}" for cell in cells)


def gain(telemetry: Mapping[str, Any], rank: int) -> Gain:
    """Return what a rank gained, from a run's `telemetry.json`.

    Raises ConfigError if it was looked at less than twice.
    """
    progress = {name: np.array(values) for name, values in telemetry["progress"].items()}
    columns = {
        name: np.array(values, np.float64)
        for name, values in telemetry["ranks"].get(str(rank), {}).get("samples", {}).items()
        if name != "gpu"
    }
    end_s = progress["seconds"][-1]
    now = columns.get("seconds", np.zeros(0))
    looks = np.flatnonzero((now >= _SETTLED * end_s) & (now <= end_s))
    if len(looks) < 2:
        raise ConfigError(
            f"rank {rank} was looked at {len(looks)} times in {end_s:.1f} s: a longer test is needed"
        )
    looks = looks[:: -(-len(looks) // _MOST_LOOKS)]
    now, rss = now[looks], columns["rss_bytes"][looks]
    done = np.interp(now, progress["seconds"], progress["samples"])
    return Gain(
        looks=len(looks),
        first_mb=rss[0] / _MB,
        last_mb=rss[-1] / _MB,
        bytes_per_sample=_slope(done, rss),
        bytes_per_hour=3600 * _slope(now, rss),
        threads=columns["threads"][looks][-1] - columns["threads"][looks][0],
        open_files=columns["open_files"][looks][-1] - columns["open_files"][looks][0],
    )


def _slope(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    first, second = np.triu_indices(len(x), 1)
    apart = x[second] > x[first]
    slopes = (y[second] - y[first])[apart] / (x[second] - x[first])[apart]
    return float(np.median(slopes)) if len(slopes) else 0.0
