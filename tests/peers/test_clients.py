"""Clients of other people against `serve`, as their documentation has them: whole reports, numbers right."""

from __future__ import annotations

import json
import math
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.peer_programs import FOLDER, MODEL, Program, Show, typed
from tests.helpers.serve_command import serve
from tests.helpers.support import DONE, Starter

pytestmark = pytest.mark.peers

N, AT_ONCE, N_INPUT, N_OUTPUT = 12, 4, 32, 16
STREAM = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
CHAT = pytest.mark.parametrize("chat", [True, False], ids=["chat", "completions"])

OPENAI = """
import json, sys, openai
url, model = sys.argv[1:]
client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
messages, prompt = [{"role": "user", "content": "Name three fruits."}], "The capital of France is"
same = {"model": model, "max_tokens": 16, "temperature": 0}
made = {"version": openai.__version__, "models": [one.id for one in client.models.list()]}
chat = client.chat.completions.create(messages=messages, **same)
made["chat"] = [chat.choices[0].message.content, chat.usage.completion_tokens, chat.choices[0].finish_reason]
parts = [*client.chat.completions.create(
    messages=messages, stream=True, stream_options={"include_usage": True}, **same)]
text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
made["chat stream"] = [text, parts[-1].usage.completion_tokens, parts[-2].choices[0].finish_reason]
plain = client.completions.create(prompt=prompt, **same)
made["completion"] = [plain.choices[0].text, plain.usage.completion_tokens, plain.choices[0].finish_reason]
parts = [*client.completions.create(
    prompt=prompt, stream=True, stream_options={"include_usage": True}, **same)]
text = "".join(part.choices[0].text for part in parts if part.choices)
made["completion stream"] = [text, parts[-1].usage.completion_tokens, parts[-2].choices[0].finish_reason]
for name, wrong in (("no model", {"model": "none"}), ("too long", {"max_tokens": 10**6})):
    try:
        client.chat.completions.create(messages=messages, **(same | wrong))
    except openai.APIStatusError as error:
        made[name] = [type(error).__name__, error.status_code, error.code]
print(json.dumps(made))
"""


@pytest.fixture(scope="module", params=["aggregated", "disaggregated"])
def url(request: pytest.FixtureRequest, start: Starter, model: Path) -> Iterator[str]:
    """Yield the address of `serve`, without /v1; it must end well, with every request answered."""
    words = ("--model_path", model, "--mode", request.param, "--max_seq_len", 1024)
    command, host, port = serve(start, 3, *words)
    yield f"http://{host}:{port}"
    command.process.send_signal(signal.SIGTERM)
    result = command.end(120).must(DONE).result
    assert (result["errors"], result["aborted"]) == (0, 0)
    shutil.rmtree(start.folder / "run")


def numbers(value: Any) -> list[float]:
    """Return all numbers that a report holds."""
    if isinstance(value, dict):
        return [number for one in value.values() for number in numbers(one)]
    if isinstance(value, list):
        return [number for one in value for number in numbers(one)]
    return [value] if isinstance(value, (int, float)) else []


def test_openai(url: str, program: Program, one: Starter, show: Show) -> None:
    if not [*FOLDER.glob("lib/python*/site-packages/openai")]:
        pytest.skip(f"{FOLDER} has no openai")
    made = json.loads(typed(one, program("python"), "-c", OPENAI, f"{url}/v1", MODEL).out)
    show(f"openai {made.pop('version')}: {made['chat'][0]!r}")
    assert made["models"] == [MODEL]
    assert made["chat stream"] == made["chat"] and made["completion stream"] == made["completion"]
    assert made["completion"][0].startswith(" Paris") and 0 < made["completion"][1] <= 16
    assert made["no model"] == ["NotFoundError", 404, "model_not_found"]
    assert made["too long"][:2] == ["BadRequestError", 400]


@STREAM
def test_curl(url: str, one: Starter, stream: bool) -> None:
    if not shutil.which("curl"):
        pytest.skip("there is no curl")
    body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0, "stream": stream}
    words = ("-sS", "--fail", f"{url}/v1/completions", "-H", "Content-Type: application/json")
    out = typed(one, "curl", *words, "-d", json.dumps(body)).out
    if stream:
        *events, done, end = out.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
        assert "".join(choice["text"] for choice in choices).startswith(" Paris")
    else:
        assert json.loads(out)["choices"][0]["text"].startswith(" Paris")


@CHAT
@STREAM
def test_aiperf(
    url: str, model: Path, program: Program, one: Starter, show: Show, chat: bool, stream: bool
) -> None:
    words: list[object] = [program("aiperf"), "profile", "--model", MODEL, "--url", url, "--tokenizer", model]
    words += ["--endpoint-type", "chat" if chat else "completions", *(["--streaming"] if stream else [])]
    words += ["--concurrency", AT_ONCE, "--request-count", N, "--synthetic-input-tokens-mean", N_INPUT]
    words += ["--output-tokens-mean", N_OUTPUT, "--extra-inputs", "ignore_eos:true", "--ui", "none"]
    typed(one, *words, "--artifact-dir", one.folder / "aiperf")
    report = json.loads((one.folder / "aiperf" / "profile_export_aiperf.json").read_text())
    assert report["is_complete"] and not report["was_cancelled"] and not report["error_summary"]
    assert report["request_count"]["avg"] == N and report["request_error_rate"]["avg"] == 0
    assert all(math.isfinite(number) for number in numbers(report))
    timed = {"request_latency", "output_token_throughput", "request_throughput"}
    if stream:
        timed |= {"time_to_first_token", "time_to_second_token", "inter_token_latency"}
        timed |= {"inter_chunk_latency", "output_token_throughput_per_user", "prefill_throughput_per_user"}
    assert all(report[name]["avg"] > 0 for name in timed)
    for name in ("usage_completion_tokens", "usage_prompt_tokens"):
        assert report[name]["count"] == N
    assert report["total_usage_completion_tokens"]["avg"] == N * N_OUTPUT
    show(f"aiperf {report['aiperf_version']}: {N} requests, {len(timed)} latencies and rates")


@CHAT
@STREAM
def test_guidellm(
    url: str, model: Path, program: Program, one: Starter, show: Show, chat: bool, stream: bool
) -> None:
    route = "/v1/chat/completions" if chat else "/v1/completions"
    backend = (
        f"kind=openai_http,target={url},model={MODEL},request_format={route},stream={str(stream).lower()}"
    )
    words: list[object] = [program("guidellm"), "run", "--backend", backend, "--disable-console"]
    words += [
        "--profile",
        f"kind=concurrent,streams={AT_ONCE}",
        "--constraint",
        f"kind=max_requests,count={N}",
    ]
    words += ["--tokenizer", f"kind=hf_auto,model={model}"]
    words += ["--data", f"kind=synthetic_text,prompt_tokens={N_INPUT},output_tokens={N_OUTPUT}"]
    typed(one, *words, "--output", f"kind=json,path={one.folder / 'guidellm.json'}")
    (benchmark,) = json.loads((one.folder / "guidellm.json").read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    assert metrics["request_totals"] == {"successful": N, "errored": 0, "incomplete": 0, "total": N}

    def mean(name: str) -> float:
        return float(metrics[name]["successful"]["mean"])

    assert mean("output_token_count") == N_OUTPUT and mean("prompt_token_count") >= N_INPUT
    timed = ["request_latency", "requests_per_second", "output_tokens_per_second", "time_per_output_token_ms"]
    timed += ["time_to_first_token_ms", "inter_token_latency_ms"] if stream else []
    assert all(mean(name) > 0 for name in timed)
    show(f"guidellm: {N} requests, {len(timed)} latencies and rates")


@CHAT
def test_vllm_bench_serve(
    url: str, model: Path, program: Program, one: Starter, show: Show, chat: bool
) -> None:
    """vLLM's benchmark always streams."""
    kind = ("openai-chat", "/v1/chat/completions") if chat else ("openai", "/v1/completions")
    words: list[object] = [program("vllm"), "bench", "serve", "--backend", kind[0], "--endpoint", kind[1]]
    words += ["--base-url", url, "--model", MODEL, "--tokenizer", model, "--dataset-name", "random"]
    words += ["--random-input-len", N_INPUT, "--random-output-len", N_OUTPUT, "--num-prompts", N]
    words += ["--max-concurrency", AT_ONCE, "--ignore-eos", "--save-result", "--save-detailed"]
    typed(one, *words, "--result-filename", "vllm.json")
    report = json.loads((one.folder / "vllm.json").read_text())
    assert (report["completed"], report["failed"]) == (N, 0)
    assert report["total_output_tokens"] == N * N_OUTPUT and report["output_lens"] == [N_OUTPUT] * N
    assert all(math.isfinite(number) for number in numbers(report))
    timed = [name for name in report if name.endswith("_ms") and not name.startswith("std")]
    assert len(timed) >= 9 and all(report[name] > 0 for name in timed), report
    show(f"vllm bench serve: {N} requests, {len(timed)} latencies")
