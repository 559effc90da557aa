"""`serve` as its users meet it: a URL, clients that stay and clients that go, a signal."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from mpillm.errors import ExitCode
from tests.helpers.make_checkpoint import make_tokenizer
from tests.helpers.oracle import Oracle
from tests.helpers.presets import save_preset
from tests.helpers.scripted_server import DONE as DONE_
from tests.helpers.scripted_server import (
    STREAM,
    Reply,
    Request,
    ScriptedServer,
    choice,
    chunk,
    event,
    good,
    plain,
)
from tests.helpers.serve_command import TIMEOUT_S, answer, metric, post, ready_at, serve, tokens_of
from tests.helpers.support import DONE, SLOW_WITH_MPICH, Starter, wait_until


def test_a_conversation_stays_at_its_instance(one: Starter) -> None:
    """Its later turns find the earlier ones in the cache; `usage` and `/metrics` count their tokens."""
    model = ("--model_path", "tiny-llama", "--enable_kv_cache_reuse", "--tokens_per_block", 4)
    command, host, port = serve(one, 4, *model, "--traffic_distribution_policy", "conversation")
    prompts = {name: [10 * i + 5] * 9 for i, name in enumerate("abc")}
    cached: list[int] = []
    for _ in range(3):
        for name, prompt in prompts.items():
            body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, "temperature": 0, "user": name}
            reply = answer(host, port, "/v1/completions", **body, return_token_ids=True)
            cached.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
            prompt += [*reply["choices"][0]["token_ids"], 7]
    # Nine tokens of the prompt, three of the response; the last token of a sequence is not in the cache.
    assert cached == [0] * 3 + [12] * 3 + [16] * 3
    assert metric(host, port, "prefix_cache_hits_total") == sum(cached)
    command.process.send_signal(signal.SIGTERM)
    ended = command.end().must(DONE)
    assert [instance["samples"] for instance in ended.result["per_instance"]] == [3, 3, 3]


def test_prefix_caches_of_all_instances_are_emptied(one: Starter) -> None:
    """By a client, and by a run before its test; without the option, a run finds the earlier prompts."""
    model = ("--model_path", "tiny-llama", "--enable_kv_cache_reuse", "--tokens_per_block", 4)
    routing = ("--traffic_distribution_policy", "kv_cache_aware", "--reset_prefix_cache")
    command, host, port = serve(one, 3, *model, *routing)
    body = {"max_tokens": 2, "ignore_eos": True, "temperature": 0}

    def cached() -> int:
        """Ask each of two instances; return the cached tokens of their prompts."""
        replies = [answer(host, port, "/v1/completions", prompt=[i] * 9, **body) for i in (5, 6)]
        return sum(reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies)

    assert [cached(), cached()] == [0, 16]
    response = post(host, port, "/reset_prefix_cache").getresponse()
    assert (response.status, response.read()) == (200, b"")
    assert [cached(), cached()] == [0, 16]
    dataset = one.folder / "prompts.jsonl"
    dataset.write_text("".join(f'{{"input_tokens": {[i] * 9}}}\n' for i in (5, 6)))
    words = ["--trtllm_server_urls", f"{host}:{port}", "--dataset_path", dataset, "--max_output_len", 2]
    words += ["--min_query_count", 2, "--end_ids", 0, "--enable_kv_cache_reuse"]
    for options, n_cached in ((), 16), (("--reset_prefix_cache",), 0):
        ended = one.run(2, *words, *options, core="trtllm_endpoint", log_dir=one.folder / f"run{n_cached}")
        (client,) = ended.must(DONE).result["per_instance"]
        assert client["server_cached_tokens"] == n_cached
    command.process.send_signal(signal.SIGTERM)
    command.end().must(DONE)


def test_disaggregated_instances_behind_one_url(one: Starter) -> None:
    """Streams and answers have the same tokens; clients that leave keep no block of a KV cache.

    After a signal open requests end.
    """
    model = (
        "--model_path",
        "tiny-llama",
        "--mode",
        "disaggregated",
        "--max_seq_len",
        512,
        "--max_batch_size",
        4,
        "--perf_metrics_max_requests",
        2,
    )
    command, host, port = serve(one, 4, *model)
    body = {
        "prompt": [5, 6, 7],
        "max_tokens": 40,
        "temperature": 0,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    whole = answer(host, port, "/v1/completions", **body)["choices"][0]["token_ids"]
    assert len(whole) == 40
    assert tokens_of(post(host, port, "/v1/completions", **body, stream=True).getresponse().read()) == whole
    chat = answer(
        host,
        port,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=5,
        ignore_eos=True,
    )
    assert chat["usage"]["completion_tokens"] == 5

    connection = HTTPConnection(host, port, timeout=TIMEOUT_S)
    connection.request("GET", "/perf_metrics")
    told = json.loads(connection.getresponse().read())
    assert len(told) == 2
    for metrics in (entry["perf_metrics"] for entry in told):
        times = metrics["timing_metrics"]
        order = ["server_arrival_time", "arrival_time", "first_scheduled_time", "first_token_time"]
        order.append("last_token_time")
        assert sorted(order, key=times.__getitem__) == order, times
        assert times["kv_cache_transfer_start"] < times["kv_cache_transfer_end"]
        assert metrics["kv_cache_metrics"] == {"num_reused_blocks": 0}

    leaving = [
        post(host, port, "/v1/completions", **{**body, "max_tokens": 500}, stream=True) for _ in range(12)
    ]
    for connection in leaving:
        connection.getresponse().read(20)
        connection.close()
    wait_until(
        lambda: metric(host, port, "num_requests_running") + metric(host, port, "num_requests_waiting") == 0,
        "the rest to end",
    )
    wait_until(lambda: metric(host, port, "kv_cache_usage_perc") == 0, "all blocks to be free")

    last = post(host, port, "/v1/completions", **{**body, "max_tokens": 400}, stream=True).getresponse()
    first = last.read(20)
    command.process.send_signal(signal.SIGTERM)
    assert len(tokens_of(first + last.read())) == 400
    ended = command.end(TIMEOUT_S).must(DONE)
    assert ended.result["status"] == "SERVED" and ended.result["samples"] >= 4 and ended.result["errors"] == 0
    assert "What is missing here" not in (ended.log_dir / "report.html").read_text()
    assert ended.result["samples"] + ended.result["aborted"] == 16


@SLOW_WITH_MPICH
def model(starter: Starter) -> Path:
    """Return a folder with a tokenizer."""
    folder = starter.folder / "model"
    make_tokenizer(folder)
    return folder


@pytest.mark.parametrize("preset", [(), ("--model_path", "tiny-llama")])
def test_another_server_without_a_tokenizer(one: Starter, preset: tuple[str, ...]) -> None:
    """Its texts became bytes, which it took for its own tokens."""
    words = [one.python, "-m", "mpillm", "mpirun", "-n", 2, "serve", "--url", "127.0.0.1:9", "--port", 0]
    ended = one.command([*words, *preset]).end(60)
    assert ended.code == ExitCode.USAGE, ended
    assert re.search("no tokenizer; .* name the folder .* with --model_path", " ".join(ended.message.split()))


@pytest.mark.parametrize("n", [1, 2])
def test_tokens_of_another_server_come_as_it_sends_them(both: Starter, n: int) -> None:
    """Clients do not wait for the end; a request that the server refuses fails alone.

    One rank has its client in the endpoint's own thread.
    """
    goes_on = threading.Event()

    def answered(request: Request) -> Reply:
        asked = request.json
        if asked["prompt"] == [9]:
            return plain({"error": {"message": "no nines"}}, "400 Bad Request")
        if asked["prompt"] == [10]:
            return plain({"error": "full"}, "429 Too Many Requests", Retry_After=70)
        if asked["prompt"] == [11, 12]:
            return Reply([STREAM, counted]) if asked.get("stream") else plain(reply)
        return Reply(pieces()) if asked.get("stream") else good(request)

    usage = {"prompt_tokens": 2, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 1}}
    reply = {**choice([13], "t", "length"), "usage": usage}
    counted = (
        chunk(event(choice([13], "t", "length"))) + chunk(event({"choices": [], "usage": usage})) + DONE_
    )

    def pieces() -> Iterator[bytes]:
        yield STREAM
        yield from (chunk(event(choice([token], "t"))) for token in (5, 6, 7))
        assert goes_on.wait(TIMEOUT_S)
        yield chunk(event(choice([8], "t", "length"))) + DONE_

    body = {"max_tokens": 4, "return_token_ids": True}
    with ScriptedServer(answered) as server:
        core = ("--url", server.address, "--model_path", model(both))
        command, host, port = serve(both, n, *core)
        stream = post(host, port, "/v1/completions", **body, prompt=[4], stream=True).getresponse()
        read = b""
        while sum(map(len, re.findall(rb'"token_ids": \[([^]]*)\]', read.replace(b", ", b"")))) < 3:
            read += stream.read1(1 << 16)
        for streams in (False, True):
            refused = post(host, port, "/v1/completions", **body, prompt=[9], stream=streams).getresponse()
            assert refused.status == 400 and json.loads(refused.read())["error"]["message"] == "no nines"
        late = post(host, port, "/v1/completions", **body, prompt=[10], stream=True).getresponse()
        assert (late.status, late.headers["Retry-After"]) == (429, "70")
        goes_on.set()
        assert tokens_of(read + stream.read()) == [5, 6, 7, 8]
        whole = answer(host, port, "/v1/completions", **body, prompt=[4])
        assert whole["choices"][0]["token_ids"] == [4, 5, 6, 7]
        assert "prompt_tokens_details" not in whole["usage"], "the server does not count them"
        cached = answer(host, port, "/v1/completions", **body, prompt=[11, 12])
        assert cached["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
        counts = {"stream": True, "stream_options": {"include_usage": True}}
        streamed = post(host, port, "/v1/completions", **body, prompt=[11, 12], **counts).getresponse().read()
        assert b'"prompt_tokens_details": {"cached_tokens": 1}' in streamed
        goes_on.clear()
        leaves = post(host, port, "/v1/completions", **body, prompt=[4], stream=True)
        leaves.getresponse().read(20)
        leaves.close()
        wait_until(lambda: metric(host, port, "num_requests_running") == 0, "the server to be left")
        goes_on.set()
        command.process.send_signal(signal.SIGTERM)
        ended = command.end(TIMEOUT_S).must(DONE)
    assert (ended.result["samples"], ended.result["errors"], ended.result["aborted"]) == (4, 3, 1)
    assert ended.result["ttft_ms"]["p50"] > 0 and "not streamed" not in ended.out


@SLOW_WITH_MPICH
@pytest.mark.parametrize("n", [1, 2])
def test_another_server_that_is_gone_is_named(both: Starter, n: int) -> None:
    def answered(request: Request) -> Reply:
        return Reply([], "stop") if request.json["prompt"] == [9] else good(request)

    with ScriptedServer(answered) as server:
        core = ("--url", server.address, "--model_path", model(both))
        command, host, port = serve(both, n, *core, "--core_options", "retry_s:0.5")
        waits = post(host, port, "/v1/completions", max_tokens=4, prompt=[9])
        ended = command.end(TIMEOUT_S).must(ExitCode.TEST_FAILED)
        waits.close()
    assert f"{server.url}/v1/completions: Connection refused; retried" in " ".join(ended.err.split())


@pytest.mark.parametrize("mpi", ["openmpi"], indirect=True)
def test_a_signal_to_a_plain_mpirun_is_a_server_s_normal_end(both: Starter, tmp_path: Path) -> None:
    """Open MPI kills the ranks a moment later: what they did is told before, without a drain.

    A machine that stalls for so long gets another chance.
    """
    for attempt in range(3):
        log_dir = tmp_path / f"run_{attempt}"
        line = [both.python, "-m", "mpillm", "serve", "--port", 0, "--log_dir", log_dir]
        more = ["--core_type", "dummy", "--core_options", "tpot_ms:1000", "--served_model_name", "mine"]
        command = both.plain(3, *line, *more, log_dir=log_dir)
        found = ready_at(command)
        answer(*found, "/v1/completions", model="mine", prompt="hello", max_tokens=1)
        cut = post(*found, "/v1/completions", model="mine", prompt="hello", max_tokens=99, stream=True)
        cut.getresponse().read(20)
        command.process.send_signal(signal.SIGTERM)
        command.end(TIMEOUT_S, tidy=False)
        result = json.loads((log_dir / "result.json").read_text())
        if "ended_by" in result and (log_dir / "report.html").exists():
            break
    assert (result["status"], result["samples"], result["cut_off"]) == ("SERVED", 1, 1), result
    assert result["ended_by"] == "interrupted (Ctrl-C, or a signal to mpirun)" and "failures" not in result
    assert len(result["per_instance"]) == 2 and result["test_s"] > 0
    noted = json.loads((log_dir / "telemetry.json").read_text())["ranks"]
    assert sorted(noted) == ["0", "1", "2"] and all(one["samples"]["cpu_s"] for one in noted.values())
    page = (log_dir / "report.html").read_text()
    assert "FAILED" not in page and "What went wrong" not in page
    assert "1 open request was cut off" in page


@pytest.mark.smoke
def test_a_signal_ends_a_server_and_says_what_it_did(both: Starter) -> None:
    command, host, port = serve(
        both, 3, "--core_type", "dummy", "--max_seq_len", 4096, "--served_model_name", "mine"
    )
    made = answer(host, port, "/v1/completions", model="mine", prompt="hello", max_tokens=3)
    assert made["model"] == "mine" and made["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    command.process.send_signal(signal.SIGINT)
    ended = command.end(TIMEOUT_S).must(DONE)
    assert "1 requests answered, 0 given up by their clients, 0 errors" in ended.out
    assert json.loads((ended.log_dir / "config.json").read_text())["served_model_name"]["value"] == "mine"


def test_cached_prompts_are_found_by_the_policy_that_looks_for_them(one: Starter) -> None:
    """6 beginnings of 4 blocks (of 32 tokens), 4 prompts with each, two instances, one request at a time.

    In turn every beginning is computed by both instances, and then found: 6 x 2 x 4 blocks. By cached
    prompts it is computed by one: 6 x 3 x 4 blocks.
    """
    yaml = one.folder / "aware.yaml"
    yaml.write_text(
        "executors: {num_instances: 2, router: {type: kv_cache_aware},"
        " kv_cache_config: {enable_block_reuse: true}}"
    )
    in_turn = ("--traffic_distribution_policy", "round_robin", "--enable_kv_cache_reuse")
    reused, cached = [], []
    for options in in_turn, ("--disagg_config", yaml):
        command, host, port = serve(one, 3, "--model_path", "tiny-llama", "--max_seq_len", 256, *options)
        in_answers = 0
        for i in range(24):
            beginning = [1 + i // 4] * 128
            made = answer(host, port, "/v1/completions", prompt=[*beginning, 50 + i], max_tokens=2)
            in_answers += made["usage"]["prompt_tokens_details"]["cached_tokens"]
        cached.append(metric(host, port, "prefix_cache_hits_total"))
        assert in_answers == cached[-1]
        assert metric(host, port, "prefix_cache_queries_total") == 24 * 129
        command.process.send_signal(signal.SIGTERM)
        instances = command.end(TIMEOUT_S).must(DONE).result["per_instance"]
        assert sum(instance["samples"] for instance in instances) == 24
        reused.append(sum(instance["reused_blocks"] for instance in instances))
    assert reused == [48, 72] and cached == [32 * n for n in reused]


def test_log_probabilities_are_those_of_transformers_whatever_the_layout(one: Starter) -> None:
    """The first token's come from the context instance (tp 2), the others' from the generation instance (pp
    2)."""
    save_preset("tiny-llama", one.folder / "model")
    make_tokenizer(one.folder / "model")
    layout = ("--mode", "disaggregated", "--ctx_tp_size", 2, "--gen_pp_size", 2, "--dtype", "float32")
    command, host, port = serve(one, 6, "--model_path", one.folder / "model", "--max_seq_len", 64, *layout)
    prompt = [5, 6, 7]
    body = {"prompt": prompt, "max_tokens": 8, "logprobs": 3, "return_token_ids": True, "ignore_eos": True}
    (whole,) = answer(host, port, "/v1/completions", **body, temperature=0)["choices"]
    expected = Oracle(one.folder / "model").logprobs(prompt, whole["token_ids"])
    chosen = [float(expected[i, token]) for i, token in enumerate(whole["token_ids"])]
    assert whole["logprobs"]["token_logprobs"] == pytest.approx(chosen, abs=1e-4)
    for told, likeliest in zip(whole["logprobs"]["top_logprobs"], expected.topk(3).values, strict=True):
        assert max(told.values()) == pytest.approx(float(likeliest[0]), abs=1e-4)
    chunks = post(host, port, "/v1/completions", **body, temperature=0, stream=True).getresponse().read()
    streamed = [json.loads(chunk[6:])["choices"][0] for chunk in chunks.decode().split("\n\n")[:-2]]
    told = [number for choice in streamed for number in choice["logprobs"]["token_logprobs"]]
    assert told == pytest.approx(chosen, abs=1e-4)
    command.process.send_signal(signal.SIGTERM)
    command.end(TIMEOUT_S).must(DONE)


def test_a_lost_instance_is_not_noticed_by_clients(one: Starter) -> None:
    """Their streams go on where they were, and nothing comes twice; what is asked later is answered, too."""
    pace = ("--core_options", "ttft_ms:50,tpot_ms:25", "--grace", 1.5)
    command, host, port = serve(one, 3, "--core_type", "dummy", *pace)
    body = {"prompt": [5, 6, 7], "max_tokens": 60, "return_token_ids": True, "ignore_eos": True}
    open_ = [post(host, port, "/v1/completions", **body, stream=True).getresponse() for _ in range(6)]
    whole_ones = [post(host, port, "/v1/completions", **body) for _ in range(4)]
    begun = [response.read(400) for response in open_]
    ranks = json.loads((command.log_dir / "ranks.json").read_text())
    os.kill(next(entry["pid"] for entry in ranks if entry["rank"] == 2), signal.SIGKILL)
    streamed = [tokens_of(start + response.read()) for start, response in zip(begun, open_, strict=True)]
    answered = [json.loads(connection.getresponse().read()) for connection in whole_ones]
    expected = answer(host, port, "/v1/completions", **body)["choices"][0]["token_ids"]
    assert len(expected) == 60
    assert streamed == [expected] * 6
    assert [made["choices"][0]["token_ids"] for made in answered] == [expected] * 4
    assert metric(host, port, "instances_lost") == 1
    assert metric(host, port, "requests_retried") > 0
    connection = HTTPConnection(host, port, timeout=TIMEOUT_S)
    connection.request("GET", "/health")
    response = connection.getresponse()
    assert response.status == 200
    told = json.loads(response.read())
    assert told["status"] == "degraded" and told["lost"][0]["instance"] == 1
    connection.close()
    command.process.send_signal(signal.SIGTERM)
    ended = command.end().must(DONE)
    assert "LOST                   instance 1 (executor)" in ended.out
    assert ended.result["retried"] == sum(lost["retried"] for lost in ended.result["lost"]) > 0
