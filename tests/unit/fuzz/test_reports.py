"""What other programs leave or say: reports of clients, statistics of engines, points that were measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import strategies as st

from disagg.errors import ConfigError
from mpillm.cores.openai_client.server_counts import ServerCounts, of_iterations
from mpillm.options.command_line import Parser
from mpillm.options.values import collect
from mpillm.programs.load_clients.kind import LoadSpec, PromptSample, Seeds
from mpillm.programs.load_clients.kinds import kind_of
from mpillm.submission.agentic_rules import AGENTIC, AgenticConfig, shortfalls
from mpillm.submission.commands import agentic_submission, endpoints_submission
from mpillm.submission.curve_command import is_measured
from mpillm.submission.seed_sets import PUBLISHED, read_seed_sets
from tests.helpers.fuzzing import changed, damaged, fuzz, json_bytes

SAMPLES = [PromptSample([1, 2, 3], "abc", 8, False), PromptSample([4], "d", 8, False)]
VALUE = {"avg": 5.0, "p50": 5.0, "p90": 5.0, "p99": 5.0}
FIGURES = {"avg": 5e6, "percentiles": {"50.0": 5e6, "90.0": 6e6, "99.0": 7e6}}
METRIC = {"successful": {"mean": 5.0, "total_sum": 8.0, "percentiles": {"p50": 5.0, "p90": 5.0, "p99": 5.0}}}
ROW = {
    "request_start_time": 1.0,
    "request_end_time": 1.5,
    "time_to_first_token_ms": 100.0,
    "output_tokens": 8,
}
# Of each kind of client, its files, as objects; of lines, a list of them.
LEFT: dict[str, dict[str, Any]] = {
    "aiperf": {
        "aiperf/profile_export_aiperf.json": {
            "aiperf_version": "0.13.0",
            "request_count": {"avg": 1.0},
            "error_request_count": {"avg": 1.0},
            "benchmark_duration": {"avg": 2.0},
            "total_output_tokens": {"avg": 8.0},
            "time_to_first_token": VALUE,
            "is_complete": True,
        },
        "aiperf/profile_export.jsonl": [
            {
                "metadata": {"conversation_id": "1", "request_start_ns": 10**9, "request_end_ns": 2 * 10**9},
                "metrics": {"time_to_first_token": {"value": 5.0}, "output_sequence_length": {"value": 8}},
                "error": {"code": 500, "message": "no"},
            }
        ],
    },
    "inference-endpoint": {
        "inference-endpoint/performance/result_summary.json": {
            "version": "0.1.0",
            "n_samples_completed": 3,
            "n_samples_failed": 1,
            "duration_ns": 2 * 10**9,
            "complete": True,
            "ttft": FIGURES,
            "tpot": {},
            "latency": FIGURES,
            "output_sequence_lengths": {"total": 11},
        },
        "inference-endpoint/sample_idx_map.json": {"performance": {"x": 0, "y": 1}},
        "inference-endpoint/events.jsonl": [
            {"event_type": "sample.issued", "timestamp_ns": 10**9, "sample_uuid": "x"},
            {"event_type": "sample.recv_first", "timestamp_ns": 2 * 10**9, "sample_uuid": "x"},
            {
                "event_type": "sample.complete",
                "timestamp_ns": 3 * 10**9,
                "sample_uuid": "x",
                "data": ["TextModelOutput", ["ab", "c"], None, None],
                "finish_reason": "stop",
            },
            {"event_type": "error.client", "timestamp_ns": 3 * 10**9, "sample_uuid": "y", "data": ["E"]},
        ],
    },
    "guidellm": {
        "guidellm.json": {
            "metadata": {"guidellm_version": "0.8.1"},
            "benchmarks": [
                {
                    "duration": 2.0,
                    "metrics": {
                        "request_totals": {"successful": 1, "errored": 1, "incomplete": 1, "total": 3},
                        "output_token_count": METRIC,
                        "time_to_first_token_ms": METRIC,
                        "inter_token_latency_ms": METRIC,
                        "request_latency": METRIC,
                    },
                    "requests": {"successful": [ROW | {"info": {"error": None}}], "errored": []},
                }
            ],
        }
    },
    "vllm-bench": {
        "vllm-bench.json": {
            "duration": 2.0,
            "completed": 1,
            "failed": 1,
            "total_output_tokens": 8,
            "start_times": [1.0, 1.1],
            "ttfts": [0.1, 0.0],
            "latencies": [0.5, 0.0],
            "output_lens": [8, 0],
            "errors": ["", "Bad Request"],
            "mean_ttft_ms": 1.0,
            "p99_ttft_ms": 4.0,
        }
    },
    "command:load {url} {report}": {
        "report.json": {
            "version": "1",
            "completed": 1,
            "failed": 0,
            "duration_s": 2.0,
            "tokens": 8,
            "ttft_ms": {"mean": 1.0},
            "requests": [[0.0, 0.1, 0.5, 8], [0.1, None, 0.2, 0, "no"]],
        }
    },
}


def text_of(left: Any) -> bytes:
    return b"\n".join(map(json_bytes, left)) if isinstance(left, list) else json_bytes(left)


@st.composite
def reports(draw: st.DrawFn) -> tuple[str, dict[str, bytes]]:
    """Draw a kind and its files, one of which is changed or damaged."""
    name = draw(st.sampled_from(sorted(LEFT)))
    files = {file: text_of(left) for file, left in LEFT[name].items()}
    file = draw(st.sampled_from(sorted(files)))
    whole = changed([LEFT[name][file]]).map(text_of)
    files[file] = draw(whole | damaged([files[file]]))
    return name, files


@fuzz(
    reports(),
    refused_by=ConfigError,
    examples=150,
    found=[
        (("vllm-bench", {"vllm-bench.json": json_bytes(LEFT["vllm-bench"]["vllm-bench.json"] | more)}),)
        for more in (
            {"duration": 10**400},
            {"duration": 1e-320},
            {"ttfts": {"0": 1}},
            {"output_lens": [2**40, 0]},
        )
    ]
    + [
        (("aiperf", {"aiperf/profile_export_aiperf.json": b'{"request_count": [1]}'}),),
        (
            (
                "command:load {url} {report}",
                {"report.json": b'{"completed": 1, "failed": 0, "duration_s": NaN}'},
            ),
        ),
        (
            (
                "command:load {url} {report}",
                {
                    "report.json": json_bytes(
                        {"completed": 1, "failed": 0, "duration_s": 2.0, "version": {'"' * 100_000: 1}}
                    )
                },
            ),
        ),
        (
            (
                "inference-endpoint",
                {file: text_of(left) for file, left in LEFT["inference-endpoint"].items()}
                | {"inference-endpoint/sample_idx_map.json": b'{"performance": {"x": 0.0, "y": 1}}'},
            ),
        ),
    ],
)
def test_reports_of_clients(folder: Path, drawn: tuple[str, dict[str, bytes]]) -> None:
    name, files = drawn
    load = LoadSpec(
        *(("http://a:1",), "m", "", folder, SAMPLES, [8, 8], [False, False], [1, 0, 1], None, None),
        *(0.0, 0, 1.0, 0, Seeds(1, 2, 3)),
    )
    for file, data in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(data)
    found = kind_of(name).report(load)
    text = json.dumps(found.to_json(), allow_nan=False)
    assert len(text) < 100_000
    for one in found.requests:
        assert SAMPLES[one.sample] and np.int32(one.tokens) >= 0 and np.isfinite(one.latency)


ITERATIONS = [
    [
        {
            "numActiveRequests": 3,
            "numQueuedRequests": 1,
            "kvCacheStats": {
                "usedNumBlocks": 5,
                "maxNumBlocks": 9,
                "reusedBlocks": 2,
                "tokensPerBlock": 32,
            },
            "specDecodingStats": {"numAcceptedTokens": 4},
        }
    ]
]


@fuzz(
    changed(ITERATIONS).map(json_bytes) | damaged([json_bytes(ITERATIONS[0])]),
    found=[(json_bytes([{"numActiveRequests": 10**400}]),)],
)
def test_statistics_of_iterations(_: Path, data: bytes) -> None:
    found = of_iterations(data.decode("utf-8", "replace"), ServerCounts())
    assert all(value is None or np.isfinite(value).all() for value in found)


def yaml_text(value: Any) -> bytes:
    return yaml.safe_dump(value, allow_unicode=True).encode("utf-8", "surrogatepass")


SEED_SETS = {
    "cohort": {
        "version": 1.0,
        "cohort-id": "2026-10-C1",
        "seed_sets": [{"id": "A", "scheduler_rng_seed": 1, "sample_index_rng_seed": 2, "model_seed": 3}],
    }
}


@fuzz(changed([SEED_SETS]).map(yaml_text) | damaged([yaml_text(SEED_SETS)]), refused_by=ConfigError)
def test_seed_sets(folder: Path, data: bytes) -> None:
    (folder / "seedset.yaml").write_bytes(data)
    for one in read_seed_sets(str(folder / "seedset.yaml")):
        assert one.name and one.line(PUBLISHED[0].cohorts[-1])


AGENTIC_CONFIG: dict[str, Any] = {
    "model_params": {"name": "m"},
    "datasets": [
        {
            "name": "c",
            "type": "performance",
            "path": "c.jsonl",
            "accuracy_config": {"eval_method": "agentic_inference_inline"},
            "agentic_inference": {"enable_salt": True, "num_trajectories_to_issue": 613},
        },
        {
            "name": "swe_bench",
            "type": "accuracy",
            "accuracy_config": {"eval_method": "swe_bench_scorer", "extras": {"num_instances": 200}},
        },
    ],
    "settings": {"load_pattern": {"type": "agentic_inference"}, "runtime": {"min_duration_ms": 0}},
    "endpoint_config": {"endpoints": ["http://h:1"]},
}


def agentic_config(section: str, value: Any) -> tuple[bytes]:
    return (yaml_text({**AGENTIC_CONFIG, section: value}),)


CONVERSATIONS, SWE_BENCH = AGENTIC_CONFIG["datasets"]


@fuzz(
    changed([AGENTIC_CONFIG]).map(yaml_text) | damaged([yaml_text(AGENTIC_CONFIG)]),
    refused_by=ConfigError,
    found=[
        agentic_config("settings", {"load_pattern": {"type": "agentic_inference"}, "runtime": None}),
        agentic_config("datasets", [CONVERSATIONS, {"name": "swe_bench", "type": "accuracy"}]),
        agentic_config("datasets", [{**CONVERSATIONS, "path": 5}]),
        agentic_config("datasets", [{**CONVERSATIONS, "type": "other"}, CONVERSATIONS]),
    ],
)
def test_configurations_of_agentic_points(folder: Path, data: bytes) -> None:
    (folder / "client.yaml").write_bytes(data)
    config = AgenticConfig.read(str(folder / "client.yaml"))
    assert all(isinstance(line, str) for line in config.violations()) and config.has_swe_bench in (
        True,
        False,
    )
    point = config.of_point(
        url="http://h:2",
        model="n",
        dataset=None,
        concurrency=8,
        repeats=2,
        seeds=PUBLISHED[0].seeds,
        report=folder,
        with_accuracy=False,
    )
    assert point["endpoint_config"]["endpoints"] == ["http://h:2"]


SCORES = {
    "accuracy_scores": [
        {"dataset_name": "performance", "dataset_type": "performance", "score": 0.57},
        {"dataset_name": "swe_bench", "dataset_type": "accuracy", "score": None},
    ]
}


@fuzz(changed([SCORES]).map(json_bytes) | damaged([json_bytes(SCORES)]), refused_by=ConfigError)
def test_scores_of_agentic_points(folder: Path, data: bytes) -> None:
    (folder / "accuracy_results.json").write_bytes(data)
    scores = agentic_submission._scores(folder)
    assert all(np.isfinite(value) for value in scores.values())
    assert all(map(str, shortfalls(AGENTIC["kimi-k3"], {8: scores}, {})))


SUMMARY = {"n_samples_issued": 20_000, "n_samples_failed": 0, "system_tps": 5.0}
NOTES = {
    "url": "h:1",
    "benchmarks": "llama3.1-8b",
    "model_scale": "full",
    "seed_set": "A",
    "min_duration": 600.0,
    "salt": {"bits": 64, "after_tokens": 1, "seed": "3/r1/1"},
    "warmup": {"concurrency": 1, "logs_retained": True},
}
OF_A_CURVE = (
    *("--url", "h:1", "--benchmarks", "llama3.1-8b", "--submitter", "Us", "--system_name", "Box"),
    *("--max_supported_concurrency", "48", "--concurrency", "1,48", "--min_duration", "600"),
)


@pytest.mark.long
@fuzz(
    changed([SUMMARY]).map(json_bytes) | damaged([json_bytes(SUMMARY)]),
    changed([NOTES]).map(yaml_text) | damaged([yaml_text(NOTES)]),
    refused_by=ConfigError,
    found=[
        (b"{}", yaml_text(NOTES)),
        (json_bytes({"n_samples_failed": 0}), yaml_text(NOTES)),
        (json_bytes(SUMMARY | {"system_tps": "x"}), yaml_text(NOTES)),
    ],
)
def test_points_of_a_curve(folder: Path, summary: bytes, notes: bytes) -> None:
    """That an earlier command has measured."""
    words = [*OF_A_CURVE, "--output", str(folder)]
    options = collect(words, endpoints_submission._Options, Parser(prog="mpillm x"))
    curve, _ = endpoints_submission._curve(options)
    for c in curve.points:
        (place := curve.folder(c)).mkdir(parents=True, exist_ok=True)
        (place / "result_summary.json").write_bytes(summary if c == 48 else json_bytes(SUMMARY))
        (place / "config.yaml").write_bytes(notes if c == 48 else yaml_text(NOTES))
    endpoints_submission._check_measured(options, curve)
    if all(is_measured(curve.folder(c)) for c in curve.points):
        curve.finish()
