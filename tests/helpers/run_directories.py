"""Run directories as a run leaves them, small: for what reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from mpillm.report.request_log import MAGIC, RECORD

SEEDS = {  # of round v6.1
    "effective_qsl_rng_seed": 2085463073848966840,
    "effective_sample_index_rng_seed": 2747215439041700203,
    "effective_schedule_rng_seed": 16159082839903944936,
}
MACHINE = {
    "cpu": {
        "model": "CPU 9000",
        "sockets": 2,
        "cores": 64,
        "threads": 128,
        "max_mhz": 3000,
        "caches": ["L1d 32K", "L2 1024K"],
    },
    "memory_bytes": 512 << 30,
    "storage": {"bytes": 900 << 30, "disks": [{"name": "nvme0n1", "bytes": 960 << 30, "type": "NVMe SSD"}]},
    "network": [{"name": f"ib{i}", "type": "InfiniBand", "mbit_per_s": 400_000} for i in range(2)],
    "gpus": [{"name": "NVIDIA H200", "memory_bytes": 141 << 30}] * 8,
    "gpu_driver": "NVRM version: 580.1",
    "operating_system": "Debian 12",
    "kernel": "6.1",
    "architecture": "x86_64",
    "software": {"torch": "2.13.0", "numpy": "2.4.6", "mlcommons-loadgen": "6.0.17"},
}
CLIENT = "inference-endpoint"
SAMPLES = 24576  # of llama2-70b
SAMPLED = {"TEST06": 100, "TEST07": 990, "TEST09": 10000}  # answers that LoadGen logs in a compliance run
# What LoadGen logs of a run as the benchmark asks for it, and the submission checker reads.
FULL_SIZE = {
    "effective_min_duration_ms": 600_000,
    "effective_min_query_count": 1,
    "effective_performance_sample_count": SAMPLES,
    "effective_accuracy_sample_count": SAMPLES,
    "effective_samples_per_query": SAMPLES,
    "effective_target_latency_ns": 0,
    "effective_sample_concatenate_permutation": True,
    "requested_use_token_latencies": True,
    "sut_name": "PySUT",
    "early_stopping_met": True,
    "result_samples_per_second": 50.0,
    "result_tokens_per_second": 5000.0,
    "result_completed_samples_per_sec": 50.0,
    "result_completed_tokens_per_second": 5000.0,
    "result_mean_latency_ns": 10**9,
    "early_stopping_latency_ss": 10**9,
    "result_90.00_percentile_latency_ns": 10**9,
    "result_99.00_percentile_latency_ns": 10**9,
    "result_first_token_99.00_percentile_latency_ns": 1_000_000_000,
    "result_time_per_output_token_99.00_percentile_ns": 100_000_000,
}


def log_entry(
    index: int, tokens: Sequence[int], first: Sequence[int] | None = None, count: int | None = None
) -> dict[str, Any]:
    """Return an entry of LoadGen's accuracy log."""
    entry = {"seq_id": index, "qsl_idx": index, "data": np.array(tokens, "<i4").tobytes().hex().upper()}
    if first is not None:
        entry["token_data"] = np.array(first, "<i4").tobytes().hex().upper()
    return {**entry, "token_count": len(tokens) if count is None else count}


def make_run(
    path: Path,
    kind: str = "performance",
    scenario: str = "Offline",
    answers: Sequence[Mapping[str, Any]] = (),
    n_samples: int | None = None,
    detail: Mapping[str, Any] | None = None,
    result: Mapping[str, Any] | None = None,
    machine: Mapping[str, Any] = MACHINE,
    workers: int = 2,
    **config: Any,
) -> Path:
    """Make a run of llama2-70b at 99.9 %, or what `config` (fields), `result` and `detail` (LoadGen's
    detailed log) say instead."""
    (path / "ranks").mkdir(parents=True)
    mode = "AccuracyOnly" if kind == "accuracy" else "PerformanceOnly"
    fields = {
        "benchmarks": ["llama2-70b"],
        "scenarios": [scenario],
        "accuracy_target": 0.999,
        "model_scale": "full",
        "core_type": "torch",
        "mode": "aggregated",
        "model_path": None,
        "dataset_path": None,
        "dtype": "bfloat16",
        "enable_kv_cache_reuse": False,
        "compliance_test": kind if kind in SAMPLED else None,
        "system_name": None,
        **config,
    }
    write(
        path / "config.json",
        {name: {"value": value, "source": "command line"} for name, value in fields.items()},
    )
    write(
        path / "result.json",
        {
            "status": "VALID",
            "scenario": scenario,
            "test_mode": mode,
            "world_size": workers + 1,
            "loadgen_unsatisfied": [],
            **(result or {}),
        },
    )
    ranks = [{"rank": 0, "roles": ["harness"], "node": "n0", "device": None}]
    ranks += [{"rank": 1 + i, "roles": ["executor"], "node": "n0", "device": i} for i in range(workers)]
    write(path / "plan.json", {"world_size": workers + 1, "ranks": ranks})
    write(
        path / "ranks.json",
        [{"rank": 0, "host": "n0", "versions": {"mpillm": "0.1.0", "Python": "3.11", "MPI": "Open MPI v5"}}],
    )
    write(path / "machines.json", {"n0": machine})
    (path / "user.conf").write_text("llama2-70b.Offline.target_qps = 10\n")
    total = len(answers) if n_samples is None else n_samples
    entries = {
        "loadgen_version": "6.0.17",
        "effective_scenario": scenario,
        "effective_test_mode": mode,
        "effective_accuracy_log_sampling_target": SAMPLED.get(kind, 0),
        "qsl_reported_total_count": total,
        "effective_accuracy_sample_count": total,
        **({"result_validity": "VALID"} if mode == "PerformanceOnly" else {}),
        **SEEDS,
        **(detail or {}),
    }
    lines = [
        ":::MLLOG " + json.dumps({"key": key, "value": value, "metadata": {"is_error": False}})
        for key, value in entries.items()
    ]
    (path / "mlperf_log_detail.txt").write_text("\n".join(lines) + "\n")
    (path / "mlperf_log_summary.txt").write_text("MLPerf Results Summary\n")
    write(path / "mlperf_log_accuracy.json", list(answers))
    return path


def make_client_run(
    path: Path,
    kind: str = "performance",
    scenario: str = "Offline",
    answers: Mapping[int, str] | None = None,
    settings: Mapping[str, Any] | None = None,
    summary: Mapping[str, Any] | None = None,
    **config: Any,
) -> Path:
    """Make a run of llama3.1-8b whose load MLCommons' client made, of full size except for the arguments:

    `settings` of the runtime in its configuration, `summary`: of its report; `answers`: its log of events.
    """
    fields = {"benchmarks": ["llama3.1-8b"], "accuracy_target": 0.99, "harness": CLIENT, **config}
    n = len(answers or {}) or 13368
    result = {"status": "MEASURED", "harness": {"name": CLIENT, "version": "0.1.0", "asked": n}}
    make_run(path, kind, scenario, result=result, **fields)
    for name in ("mlperf_log_detail.txt", "mlperf_log_summary.txt", "mlperf_log_accuracy.json"):
        (path / name).unlink()
    left = path / "harness" / CLIENT
    (left / "performance").mkdir(parents=True)
    runtime = {
        "min_duration_ms": 600_000,
        "n_samples_to_issue": n,
        "dataloader_random_seed": SEEDS["effective_sample_index_rng_seed"],
        "scheduler_random_seed": SEEDS["effective_schedule_rng_seed"],
        **(settings or {}),
    }
    pattern = {"type": "max_throughput" if scenario == "Offline" else "poisson"}
    written = {
        "version": "1.0",
        "type": "offline" if scenario == "Offline" else "online",
        "model_params": {"streaming": "on"},
        "settings": {"runtime": runtime, "load_pattern": pattern},
    }
    (left / "config.yaml").write_text(yaml.safe_dump(written))
    latencies: dict[str, Any] = {"min": 1, "max": 10**8, "avg": 10**7, "percentiles": {"50.0": 10**7}}
    latencies["early_stopping_percentiles"] = {"50.0": 10**7, "99.0": 10**7, "99.9": None}
    lengths = {"min": 1, "max": 128, "avg": 120.5, "total": 120 * n, "percentiles": {}}
    found: dict[str, Any] = {"version": "0.1.0", "git_sha": "abc", "test_started_at": 1}
    found |= {"state": "complete", "complete": True, "duration_ns": 610 * 10**9, "qps": 20.0, "tps": 2400.0}
    found |= {"n_samples_issued": n, "n_samples_completed": n, "n_samples_failed": 0}
    found |= {"ttft": latencies, "tpot": latencies, "latency": latencies, "output_sequence_lengths": lengths}
    write(left / "performance" / "result_summary.json", found | dict(summary or {}))
    uuids = {f"{index:032x}": index for index in answers or {}}
    write(left / "sample_idx_map.json", {"performance": uuids})
    end = {"event_type": "sample.complete", "timestamp_ns": 1}
    ends = [
        {**end, "sample_uuid": uuid, "data": ["TextModelOutput", text]}
        for uuid, text in zip(uuids, (answers or {}).values(), strict=True)
    ]
    (left / "events.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in ends))
    return path


def write_rows(folder: Path, rows: NDArray[np.void]) -> None:
    """Write records of requests, in this order."""
    (folder / "requests.bin").write_bytes(MAGIC + rows.tobytes())


def read_rows(folder: Path) -> NDArray[np.void]:
    """Return the records of requests, in the file's order, to change them."""
    return np.frombuffer((folder / "requests.bin").read_bytes(), RECORD, offset=len(MAGIC)).copy()


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def comparable_run(
    path: Path, ttft_s: float, scenario: str = "Server", n: int = 1000, seed: int = 0, **config: Any
) -> Path:
    """Make a run of `n` requests whose first tokens take about `ttft_s`, the same for a `seed`."""
    make_run(path, scenario=scenario, result={"loadgen_result": "VALID", "samples": n}, **config)
    rng = np.random.default_rng(seed)
    rows = np.zeros(n, RECORD)
    rows["issued"] = np.cumsum(rng.exponential(0.01, n))
    rows["ttft"] = ttft_s * rng.lognormal(0, 0.1, n)
    rows["tokens"] = 11
    rows["latency"] = rows["ttft"] + 0.1
    rows["prompt"] = rows["cached"] = -1
    write_rows(path, rows)
    return path


EMPTY: dict[str, list[float]] = {"start": [], "end": [], "busy_s": [], "n": [], "kind": []}


def spans(start: float, end: float, kind: int) -> dict[str, list[float]]:
    starts = [start + 0.1 * i for i in range(round((end - start) / 0.1))]
    return {
        "start": starts,
        "end": [one + 0.1 for one in starts],
        "busy_s": [0.1] * len(starts),
        "n": [1] * len(starts),
        "kind": [kind] * len(starts),
    }


def noted(steps: dict[str, list[float]], gpu_watts: float | None = None) -> dict[str, Any]:
    """Return the telemetry of a rank that was busy in `steps`; its GPU drew so much all the time."""
    seconds = [0.5 * i for i in range(21)]

    def until(kind: int) -> list[float]:
        mine = [
            (b, e) for b, e, k in zip(steps["start"], steps["end"], steps["kind"], strict=True) if k == kind
        ]
        return [sum(max(0, min(e, now) - b) for b, e in mine if b < now) for now in seconds]

    samples: dict[str, Any] = {
        "seconds": seconds,
        "cpu_s": [0.9 * now for now in seconds],
        "rss_bytes": [1 << 30] * 21,
        "context_s": until(0),
        "decode_s": until(1),
        "busy_s": [0.0] * 21,
        "handoff_s": [0.0] * 21,
    }
    if gpu_watts:
        columns = ("sm_mhz", "memory_mhz", "temperature_c", "memory_bytes", "load")
        samples["gpu"] = {
            "seconds": seconds,
            "power_w": [gpu_watts] * 21,
            "energy_j": [None] * 21,
            **{name: [None] * 21 for name in columns},
        }
    phases = [["load", -2.0, -1.0], ["test", 0.0, 10.0]]
    return {"phases": phases, "knows_steps": True, "steps": steps, "handoffs": EMPTY, "samples": samples}
