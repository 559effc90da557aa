"""Run directories: `report` shows what can be read, whatever that is; the other commands refuse by name."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from disagg.errors import ConfigError
from mpillm.commands import report, rerun, runs
from mpillm.experiments.commands import compare
from mpillm.loadgen.logs import read_answers
from mpillm.submission.judged_run import JudgedRun
from tests.helpers.fuzzing import changed, damaged, fuzz, json_bytes, new_folder
from tests.helpers.pages import Wellformed
from tests.helpers.run_directories import EMPTY, comparable_run, log_entry, noted, spans

LATENCY = {"p50": 100.0, "p90": 150.0, "p99": 250.0, "mean": 110.0}
RESULT = {
    "status": "INVALID",
    "loadgen_result": "INVALID",
    "scenario": "Server",
    "test_mode": "PerformanceOnly",
    "core_type": "dummy",
    "model": "a/b",
    "workload": None,
    "world_size": 3,
    "samples": 40,
    "errors": 1,
    "retried": 0,
    "phase": "test",
    "exit_code": 0,
    "lost": [{"instance": 1, "role": "gen", "cause": "killed", "at_s": 1.0, "ranks": [2]}],
    "failures": [{"rank": 1, "cause": "it broke", "traceback": "Traceback", "doctor": "a line"}],
    "doubts": ["a doubt"],
    "loadgen": {"ttft_latency_ms": 200.0, "tpot_latency_ms": None, "target_qps": 3.0, "expected_queries": 57},
    "loadgen_unsatisfied": ["latency limits"],
    "loadgen_advice": ["TTFT: too slow"],
    "phases_s": {"join": 0.1, "load": 1.0, "test": 10.0},
    "tokens": 2000,
    "tokens_per_second": 200.0,
    "samples_per_second": 0.9,
    "test_s": 10.0,
    "ttft_ms": LATENCY,
    "tpot_ms": LATENCY,
    "latency_ms": LATENCY,
    "per_instance": [
        {
            "instance": i,
            "samples": 9,
            "tokens": 10,
            "kv_bytes": 4,
            "busy_fraction": 0.5,
            "metrics": {
                "prompt_tokens": 100,
                "generated_tokens": 9,
                "running": {"mean": 1.0, "peak": 2, "last": 0},
            },
        }
        for i in (0, 1)
    ],
    "cpu_cores": {"harness": 0.5},
    "compiled": 0,
}
TELEMETRY = {
    "format": 1,
    "started": 1.7e9,
    "kinds": ["context", "decode", "mixed", "busy", "handoff"],
    "progress": {"seconds": [0, 5, 10], "issued": [9, 9, 9], "samples": [0, 4, 9], "tokens": [0, 900, 2000]},
    "cdf": {"ttft": {"ms": [50.0, 100.0, 250.0], "share": [0.1, 0.5, 1.0]}},
    "ranks": {
        "0": noted(EMPTY),
        "1": noted(spans(0, 0.3, 0), gpu_watts=100.0),
        "2": noted(spans(1, 1.3, 1), gpu_watts=300.0),
    },
}
ROLES = (["harness", "leader"], None), (["ctx"], 0), (["gen"], 1)
PLAN = {
    "world_size": 3,
    "ranks": [
        {"rank": rank, "roles": roles, "node": "n0", "instance": i, "device": i, "tp_rank": 0, "pp_rank": 0}
        for rank, (roles, i) in enumerate(ROLES)
    ],
}
ROW = {
    "seconds": 1.0,
    "instance": 0,
    "prompt_tokens": 9,
    "generated_tokens": 3,
    "running": 4,
    "waiting": 0,
    "kv_cache_usage": 0.5,
}
ENVIRONMENT = {
    "mpillm": "0.1.0",
    "commit": None,
    "packages": {"numpy": "1"},
    "cores": 2,
    "variables": {"OMP_X": "1"},
}
SEEDS: dict[str, Any] = {
    "result.json": RESULT,
    "telemetry.json": TELEMETRY,
    "plan.json": PLAN,
    "environment.json": ENVIRONMENT,
}


@cache
def whole() -> Path:
    """Return a run directory; it stays as it is."""
    path = comparable_run(new_folder() / "run", 0.1, n=40)
    for name, value in SEEDS.items():
        (path / name).write_bytes(json_bytes(value))
    (path / "timeline.jsonl").write_bytes(json_bytes(ROW) + b"\n")
    return path


def of_run(name: str) -> st.SearchStrategy[bytes]:
    """Draw a file of a run, changed."""
    data = (whole() / name).read_bytes()
    if name.endswith(".json"):
        return changed([json.loads(data)]).map(json_bytes) | damaged([data], most=2)
    return damaged([data])


HUGE = {"tokens_per_second": 10**400}
LONG = {"status": "\\" * 200_000}
NAMES = [
    *("result.json", "config.json", "plan.json", "ranks.json", "machines.json", "telemetry.json"),
    *("environment.json", "timeline.jsonl", "requests.bin", "mlperf_log_detail.txt"),
]
ONE = st.sampled_from([*NAMES, "result.json", "result.json", "telemetry.json", "telemetry.json"])
FILES = st.deferred(
    lambda: (
        ONE.flatmap(lambda name: of_run(name).map(lambda data: {name: data}))
        | st.tuples(
            ONE.flatmap(lambda a: of_run(a).map(lambda d: (a, d))),
            ONE.flatmap(lambda b: of_run(b).map(lambda d: (b, d))),
        ).map(dict)
    )
)


def laid(folder: Path, files: dict[str, bytes]) -> Path:
    """Lay a run with these files; return its directory."""
    path = folder / "runs" / "it"
    if not path.exists():
        shutil.copytree(whole(), path)
    for name in NAMES:
        data = files[name] if name in files else (whole() / name).read_bytes()
        (path / name).write_bytes(data)
    return path


def output_of(main: Any, *argv: object) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main([str(one) for one in argv])
    return out.getvalue()


@pytest.mark.long
@fuzz(FILES, examples=50)
def test_report(folder: Path, files: dict[str, bytes]) -> None:
    """A page is always made."""
    path = laid(folder, files)
    output_of(report.main, path)
    text = (path / "report.html").read_text(encoding="utf-8")
    Wellformed(text)
    json.loads((path / "trace.json").read_text(encoding="utf-8"))


@fuzz(
    FILES,
    examples=30,
    found=[
        ({"result.json": json_bytes(json.loads((whole() / "result.json").read_bytes()) | odd)},)
        for odd in (HUGE, LONG)
    ],
)
def test_runs(folder: Path, files: dict[str, bytes]) -> None:
    laid(folder, files)
    output_of(runs.main, folder / "runs")
    Wellformed((folder / "runs" / "index.html").read_text(encoding="utf-8"))


@fuzz(
    FILES,
    refused_by=ConfigError,
    examples=30,
    found=[
        ({"result.json": json_bytes(json.loads((whole() / "result.json").read_bytes()) | more)},)
        for more in ({"doubts": 3}, HUGE)
    ],
)
def test_compare(folder: Path, files: dict[str, bytes]) -> None:
    output_of(compare.main, whole(), laid(folder, files), "--log_dir", folder / "page")
    Wellformed((folder / "page" / "compare.html").read_text(encoding="utf-8"))


@pytest.mark.long
@fuzz(FILES, refused_by=ConfigError, examples=30)
def test_rerun(folder: Path, files: dict[str, bytes]) -> None:
    output_of(rerun.main, laid(folder, files), "--dry_run")


@fuzz(
    FILES,
    refused_by=ConfigError,
    examples=30,
    found=[({"config.json": (whole() / "config.json").read_bytes().replace(b'["llama2-70b"]', b"[]")},)],
)
def test_runs_to_submit(folder: Path, files: dict[str, bytes]) -> None:
    run = JudgedRun.read(laid(folder, files))
    assert run.scenario is not None and run.is_accuracy is not None
    run.workload  # noqa: B018 - or an error


ANSWERS = [[log_entry(0, [1, 2]), log_entry(1, [3], [3])]]


@fuzz(changed(ANSWERS).map(json_bytes) | damaged([json_bytes(ANSWERS[0])]), refused_by=ConfigError)
def test_accuracy_log(folder: Path, data: bytes) -> None:
    (file := folder / "mlperf_log_accuracy.json").write_bytes(data)
    read_answers(file)
