"""`bench routing` prints what it has measured, also where a baseline fails."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest

from disagg.errors import ConfigError
from mpillm.experiments.bench import bench_routing
from mpillm.experiments.bench.bench_routing import main
from mpillm.options import json_output

RUN = {
    "samples_per_second": 50.0,
    "samples": 10,
    "startup_s": 0.5,
    "loadgen_result": "VALID",
    "route": {"messages": 20, "message_bytes": 400},
    "ttft_ms": {"p50": 2.0, "p99": 4.0},
    "cpu_cores": [0.5, 0.25, 0.25],
}


LENGTHS = {
    "input_len": 128,
    "output_len": 16,
    "offline_samples": 10,
    "server_s": 1.0,
    "idle_s": 1.0,
    "mode": "aggregated",
    "traffic_distribution_policy": "round_robin",
    "control_ranks": 1,
}


def test_a_baseline_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """Its figures are dashes with the reason; where one round of it failed, the others count."""
    rounds = iter([[1.0, 2.0], None, None, None])

    def child(module: str, *words: str) -> list[float]:
        if module == "empty_system":
            return [100.0]
        if (found := next(rounds)) is None:
            raise ConfigError("aiohttp_pair: exit code 1: ServerDisconnectedError: Server disconnected")
        return found

    def run_once(*words: object) -> dict[str, Any]:
        return dict(RUN)

    config: Any = SimpleNamespace(n=3, repeats=2, qps=(20, 40), **LENGTHS)
    json_output.begin()
    assert main(config, run_once, child) == 0
    json_output.end()
    figures, printed = capsys.readouterr()
    lines = printed.splitlines()
    rows = {(one["test"], one["figure"]): one["values"] for one in json.loads(figures)}
    assert rows["Server at 20/s", "part of aiohttp's p50"] == [2.0, None]
    assert rows["Server at 40/s", "aiohttp's latency p99, ms"] == [None, None]
    assert "NaN" not in figures and rows["Server at 40/s", "first-token latency p50, ms"] == [2.0, 2.0]
    table = "\n".join(lines)
    assert "aiohttp's latency p50, ms              1.00  (1.00 to 1.00)" in table
    assert "aiohttp's latency p50, ms                 -\n" in table
    assert lines[-1] == (
        "  not measured: aiohttp_pair: exit code 1: ServerDisconnectedError: Server disconnected"
    )


def test_why_a_baseline_failed() -> None:
    with pytest.raises(ConfigError, match=r"aiohttp_pair: exit code 1: ValueError: .*'many'"):
        bench_routing._child("aiohttp_pair", "many")
    assert not math.isnan(bench_routing._ratios([1.0], [2.0])[0])
