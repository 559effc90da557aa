"""Runs whose cores are clients of an OpenAI-compatible server: a scripted one, in this process."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.helpers.failures import check_failure
from tests.helpers.scripted_server import Reply, Request, ScriptedServer, answer_of, good, head
from tests.helpers.serve_command import serve
from tests.helpers.support import DONE, TEST_FAILED, Ended, Starter, make_samples

N = 40  # samples


def check_answers(ended: Ended, prompts: list[list[int]]) -> None:
    """Check that every sample has its own answer, and that nothing was asked twice."""
    result = ended.must(DONE).result
    assert (result["status"], result["errors"], len(result["per_instance"])) == ("VALID", 0, 2)
    outputs = {line["index"]: line["output_tokens"] for line in ended.outputs()}
    assert outputs == {i: answer_of(prompt, 6) for i, prompt in enumerate(prompts)}
    for instance in result["per_instance"]:
        assert 0 < instance["client_busy_fraction"] <= 1
        assert instance["retries"] == instance["retokenized"] == instance["other_answer_length"] == 0
    assert sum(instance["samples"] for instance in result["per_instance"]) == result["samples"]


def test_a_leader_that_its_yaml_names(one: Starter, tmp_path: Path) -> None:
    """Two clients run an Offline test, whatever the YAML says of the servers behind the leader."""
    samples = make_samples(tmp_path / "samples.jsonl", range(1, N + 1))
    with ScriptedServer() as server:
        host, _, port = server.address.partition(":")
        yaml = tmp_path / "disagg.yaml"
        sections = (
            "context_servers: {num_instances: 3}\ngeneration_servers: {num_instances: 2,"
            " tensor_parallel_size: 4}\n"
        )
        yaml.write_text(f"hostname: {host}\nport: {port}\nmodel: llama\nbackend: pytorch\n{sections}")
        options = [
            "--trtllm_disagg_config_path",
            yaml,
            "--core_options",
            "model:scripted",
            "--dataset_path",
            samples.path,
        ]
        ended = one.run(3, *options, "--max_output_len", 6, "--save_outputs", core="trtllm_disagg")
    check_answers(ended, samples.prompts)


def test_two_servers(one: Starter, tmp_path: Path) -> None:
    """A Server test streams from two servers, with a client for each."""
    samples = make_samples(tmp_path / "samples.jsonl", range(1, N + 1))
    conf = tmp_path / "user.conf"
    conf.write_text(
        "".join(f"*.Server.{name} = 60000\n" for name in ("target_latency", "ttft_latency", "tpot_latency"))
    )
    with ScriptedServer() as first, ScriptedServer() as second:
        urls = f"{first.address},{second.address}"
        options = [
            "--trtllm_server_urls",
            urls,
            "--dataset_path",
            samples.path,
            "--max_output_len",
            6,
            "--save_outputs",
            "--user_conf",
            conf,
        ]
        test = [
            "--scenarios",
            "Server",
            "--server_target_qps",
            400,
            "--min_query_count",
            800,
            "--min_duration",
            0,
        ]
        ended = one.run(3, *options, *test, core="trtllm_endpoint")
        for server in (first, second):
            assert sum(body.get("stream", False) for body in server.bodies()) > 1
    check_answers(ended, samples.prompts)
    assert all(instance["socket_ttft_p50_ms"] > 0 for instance in ended.result["per_instance"])


@pytest.mark.smoke
def test_our_own_server(one: Starter, tmp_path: Path) -> None:
    """A run over HTTP to `serve` gets the tokens that a run over MPI gets from the same cores."""
    samples = make_samples(tmp_path / "samples.jsonl", range(1, N + 1))
    server, host, port = serve(one, 2, "--core_type", "dummy")
    options = [
        "--trtllm_server_urls",
        f"{host}:{port}",
        "--dataset_path",
        samples.path,
        "--max_output_len",
        6,
    ]
    ended = one.run(2, *options, "--save_outputs", core="trtllm_endpoint", log_dir=tmp_path / "client").must(
        DONE
    )
    outputs = {line["index"]: line["output_tokens"] for line in ended.outputs()}
    assert outputs == {i: samples.answer(i, 6) for i in range(N)}
    assert (ended.result["status"], ended.result["per_instance"][0]["retokenized"]) == ("VALID", 0)
    server.process.send_signal(signal.SIGTERM)
    server.end().must(DONE)


def test_a_server_that_takes_prompts_from_its_cache(one: Starter, tmp_path: Path) -> None:
    """LoadGen calls the test VALID; the run does not, and says of which option it is."""
    samples = make_samples(tmp_path / "samples.jsonl", range(1, N + 1))
    cached: list[Request] = []

    def completions(request: Request) -> Reply:
        cached.append(request)
        return good(request)

    def metrics(request: Request) -> Reply:
        body = f"vllm:prefix_cache_hits_total {16.0 * len(cached)}\n".encode()
        return Reply([head(Content_Length=len(body)) + body])

    with ScriptedServer(completions, {"/metrics": metrics}) as server:
        options = ["--trtllm_server_urls", server.address, "--dataset_path", samples.path]
        length = ("--max_output_len", 6)
        ended = one.run(2, *options, *length, core="trtllm_endpoint").must(DONE)
        (refusal,) = [found for found in ended.result["server_checks"].values() if found]
        assert (ended.result["status"], ended.result["loadgen_result"]) == ("INVALID", "VALID")
        assert "vLLM has --no-enable-prefix-caching" in refusal and refusal in ended.result["doubts"]
        assert f"REFUSED not VALID: {refusal}" in " ".join(ended.out.split())
        one.run(2, *options, *length, "--require_valid", core="trtllm_endpoint").must(TEST_FAILED)
        meant = one.run(2, *options, *length, "--enable_kv_cache_reuse", core="trtllm_endpoint").must(DONE)
        assert meant.result["status"] == "VALID" and "REFUSED" not in meant.out


def test_a_server_that_dies_in_the_test(one: Starter, tmp_path: Path) -> None:
    samples = make_samples(tmp_path / "samples.jsonl", range(1, N + 1))

    def dies(request: Request) -> Reply:
        return Reply([], "stop") if len(request.json["prompt"]) == N else good(request)

    with ScriptedServer(dies) as server:
        options = [
            "--trtllm_server_urls",
            server.address,
            "--dataset_path",
            samples.path,
            "--core_options",
            "retry_s:1",
            "--grace",
            1.5,
        ]
        ended = one.run(3, *options, core="trtllm_endpoint")
    check_failure(
        ended, TEST_FAILED, f"{server.url}/v1/completions: Connection refused; retried", phase="test"
    )
