"""A real tritonserver with the embedded engine behind it, started as a user starts it.

Only with `make test-triton`, which installs one (`make triton`).
"""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.helpers.ports import free_port, free_ports
from tests.helpers.real_triton import (
    CURL,
    EMBEDDED,
    MARKS,
    TIMEOUT_S,
    TRITONSERVER,
    generate,
    post,
    serving,
    start,
)
from tests.helpers.support import (
    DONE,
    INSTANCE_LOST,
    NOT_READY,
    Starter,
    make_samples,
)
from tests.helpers.traced_options import OF_A_CLIENT, lies, read_by
from tests.random_server_faults import Round, play

pytestmark = MARKS


def test_text_in_text_out(one: Starter) -> None:
    """The curl lines of TensorRT-LLM's backend get whole answers, streams, and twenty answers at once."""
    generate(one, "--triton_text_models")
    with serving(one) as (_, (port,)):
        whole = {
            name: json.loads(post(port, f"{name}/generate", CURL))
            for name in ("ensemble", "tensorrt_llm_bls")
        }
        text = whole["ensemble"]["text_output"]
        assert text and whole["tensorrt_llm_bls"]["text_output"] == text
        for name, answer in whole.items():
            assert (answer["model_name"], answer["model_version"]) == (name, "1")
            assert answer["cum_log_probs"] == 0 and len(answer["output_log_probs"]) == 20
        for name in whole:
            stream = post(port, f"{name}/generate_stream", {**CURL, "stream": True})
            parts = [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line]
            # a byte of a longer character is told alone, and is no character: lengths are compared
            assert len(parts) == 20 and "".join(part["text_output"] for part in parts)[0] == text[0]
        with ThreadPoolExecutor(20) as threads:
            answers = [*threads.map(lambda _: post(port, "ensemble/generate", CURL), range(20))]
        assert {json.loads(answer)["text_output"] for answer in answers} == {text}
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(port, "ensemble/generate", {**CURL, "beam_width": 5})
        assert "beam_width 5: the model's max_beam_width is 4" in refused.value.read().decode()


@pytest.mark.parametrize(
    ("scenario", "flags", "decoupled", "policy"),
    [
        ("Offline", EMBEDDED, False, None),
        ("Offline", f"{EMBEDDED},decoupled_mode:true,gpt_model_type:V1", True, "V1"),
        (
            "Server",
            f"{EMBEDDED},batch_scheduler_policy:guaranteed_no_evict,enable_kv_cache_reuse:true,"
            "enable_chunked_context:true,max_tokens_in_paged_kv_cache:2048,kv_cache_free_gpu_mem_fraction:0.5,"
            "max_queue_size:100,max_queue_delay_microseconds:10,exclude_input_in_output:true",
            True,
            "inflight_fused_batching",
        ),
    ],
)
def test_every_variant_loads(
    scenario: str, flags: str, decoupled: bool, policy: str | None, one: Starter
) -> None:
    generate(one, scenario=scenario, flags=flags)
    (name,) = (path.parent.name for path in (one.folder / "repo_0").glob("*/config.pbtxt"))
    with serving(one) as (_, (port,)):
        with urllib.request.urlopen(
            f"http://localhost:{port}/v2/models/{name}/config", timeout=300
        ) as answer:
            config = json.load(answer)
        assert config["model_transaction_policy"]["decoupled"] is decoupled
        assert (len(config["input"]), len(config["output"])) == (62, 21)
        if policy:
            assert config["parameters"]["gpt_model_type"]["string_value"] == policy


@pytest.mark.parametrize("scenario", ["Offline", "Server"])
def test_a_test_through_two_servers(scenario: str, one: Starter) -> None:
    """Two servers, two frontends each, two clients each give a VALID test with the engine's own tokens."""
    make_samples(one.folder / "samples.jsonl", [3 + 5 * i % 60 for i in range(32)])
    options = [
        "--scenarios",
        scenario,
        "--dataset_path",
        one.folder / "samples.jsonl",
        *("--max_output_len", 8, "--min_query_count", 480 if scenario == "Server" else 64),
        *("--min_duration", 0.1, "--save_outputs"),
        *(["--server_target_qps", 60] if scenario == "Server" else []),
    ]
    ours = one.run(
        3,
        *options,
        "--model_path",
        "tiny-llama",
        core="torch",
        timeout=TIMEOUT_S,
        log_dir=one.folder / "ours",
    ).must(DONE)
    generate(one, "--triton_num_servers=2", "--triton_num_models_per_server=1", scenario=scenario)
    with serving(one, 2) as (ports, _):
        urls = ",".join(f"localhost:{port}" for port in ports)
        servers = ["--triton_skip_server_spawn", "--triton_server_urls", urls]
        ended = one.run(
            6,
            *options,
            *servers,
            "--triton_num_clients_per_frontend",
            2,
            core="triton_grpc",
            timeout=TIMEOUT_S,
        ).must(DONE)
    assert (ended.result["status"], ended.result["errors"]) == ("VALID", 0), ended
    expected = {line["index"]: line["output_tokens"] for line in ours.outputs()}
    assert {line["index"]: line["output_tokens"] for line in ended.outputs()} == expected


OWNED = ("--server=tritonserver", "--triton_model_repo=repo", f"--tritonserver={TRITONSERVER}")


@pytest.mark.parametrize("scenario", ["Offline", "Server"])
def test_a_test_through_two_servers_of_its_own(scenario: str, one: Starter) -> None:
    """One mpirun starts both: two servers, two frontends each, two clients each."""
    make_samples(one.folder / "samples.jsonl", [3 + 5 * i % 60 for i in range(32)])
    words: list[object] = ["--scenarios", scenario, "--dataset_path", one.folder / "samples.jsonl"]
    words += ["--max_output_len", 8, "--min_query_count", 480 if scenario == "Server" else 64]
    words += ["--min_duration", 0.1, "--save_outputs"]
    words += ["--server_target_qps", 60] if scenario == "Server" else []
    model = ("--model_path", "tiny-llama")
    ours = one.run(2, *words, *model, core="torch", timeout=TIMEOUT_S, log_dir=one.folder / "ours").must(DONE)
    generate(one, "--triton_num_servers=2", "--triton_num_models_per_server=1", scenario=scenario)
    clients = ("--clients_per_server", 2, "--triton_num_clients_per_frontend", 2)
    ended = one.run(5, *words, *OWNED, *clients, core="triton_grpc", timeout=TIMEOUT_S).must(DONE)
    assert (ended.result["status"], ended.result["errors"]) == ("VALID", 0), ended
    expected = {line["index"]: line["output_tokens"] for line in ours.outputs()}
    assert {line["index"]: line["output_tokens"] for line in ended.outputs()} == expected
    assert [instance["clients"] for instance in ended.result["per_instance"]] == [2, 2, 2, 2]
    assert all((ended.log_dir / f"server_{index}.log").exists() for index in (0, 1))


_PROCESSES = [b"bin/tritonserver\0--backend", b"triton_python_backend_stub"]


@pytest.mark.parametrize("whose", _PROCESSES)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_of_an_own_server_is_killed_or_stopped(whose: bytes, number: int, one: Starter) -> None:
    make_samples(one.folder / "samples.jsonl", [40] * 32)
    generate(one, scenario="Offline")
    words = ["--dataset_path", one.folder / "samples.jsonl", "--max_output_len", 64, "--min_duration", 0]
    command = one.start(2, *words, *OWNED, "--min_query_count", 4096, core="triton_grpc")
    command.wait_phase("test")
    victim = next(pid for pid in command.pids() if whose in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(victim, number)
    ended = command.end(60, lingers=15).must(INSTANCE_LOST)
    how = f"is stopped: kill -CONT {victim}" if number == signal.SIGSTOP else "(SIGKILL)"
    assert how in ended.message and "server 0 (tritonserver)" in ended.message, repr(ended)


@pytest.mark.parametrize("seed", range(3))
def test_random_faults(seed: int, tmp_path: Path) -> None:
    print(play(Round.of(seed, "tritonserver"), tmp_path))


def test_a_harness_that_starts_its_servers(one: Starter) -> None:
    """NVIDIA's lines, without another shell: servers, frontends and ranks follow from the options."""
    samples = make_samples(one.folder / "samples.jsonl", [5, 40, 17, 60])
    generate(one, scenario="Offline")
    words = ["--harness_type=triton", "--scenarios=Offline", "--triton_model_repo=repo", "--log_dir=run"]
    words += ["--triton_num_servers=1", "--triton_num_frontends_per_model=2", "--max_output_len=8"]
    words += [f"--tritonserver={TRITONSERVER}", f"--dataset_path={samples.path}", "--min_duration=0"]
    command = one.command([one.python, "-m", "mpillm", "run-harness", *words])
    ended = command.end(TIMEOUT_S).must(DONE)
    assert "each test starts its tritonservers" in ended.out and "mpillm mpirun -n 3 run" in ended.out
    roles = [rank["roles"] for rank in ended.json("plan.json")["ranks"]]
    assert roles == [["harness", "leader"], ["server", "executor"], ["executor"]]


def test_a_request_that_is_refused_does_not_end_a_test(one: Starter) -> None:
    lengths = [4, 5, 5000, 6]
    make_samples(one.folder / "samples.jsonl", lengths)
    generate(one, scenario="Offline")
    with serving(one) as ((port,), _):
        ended = one.run(
            3,
            *("--dataset_path", one.folder / "samples.jsonl", "--max_output_len", 4, "--min_query_count", 4),
            *("--triton_grpc_ports", f"localhost:{port}", "--min_duration", 0.1),
            core="triton_grpc",
            timeout=TIMEOUT_S,
        ).must(DONE)
    assert ended.result["errors"] == 1, ended


def test_a_missing_server_and_the_wrong_port(one: Starter) -> None:
    port = free_port()
    options = ("--load_deadline", 10, "--triton_server_urls", f"localhost:{port}")
    ended = one.run(3, *options, core="triton_grpc", timeout=TIMEOUT_S).must(NOT_READY)
    assert f"tritonserver localhost:{port} was not ready within 9 s: UNAVAILABLE" in ended.message
    generate(one)
    with serving(one) as (_, (http,)):
        options = ("--load_deadline", 10, "--triton_server_urls", f"localhost:{http}")
        ended = one.run(3, *options, core="triton_grpc", timeout=TIMEOUT_S).must(NOT_READY)
    assert "this is an HTTP port; gRPC has one of its own" in ended.message


def test_a_model_that_does_not_load(one: Starter) -> None:
    """The message names the model at once, with the server's last lines."""
    generate(one)
    (config,) = (one.folder / "repo_0").glob("*/config.pbtxt")
    config.write_text(config.read_text().replace(r"\"tiny-llama\"", r"\"tiny-lama\""))
    ended = start(one, free_ports(1)).end(TIMEOUT_S).must(NOT_READY)
    assert "tritonserver 0 ended with exit code 1 before it was ready" in ended.message
    assert "no such preset (did you mean 'tiny-llama'?)" in ended.message


@pytest.mark.parametrize("command", ["run", "serve"])
def test_the_client_reads_its_declared_options(one: Starter, command: str) -> None:
    """See `test_options_read`."""
    generate(one, scenario="Offline")
    with serving(one) as ((port,), _):
        of_core = (
            "--core_type=triton_grpc",
            f"--trtllm_runtime_flags={EMBEDDED}",
            f"--triton_grpc_ports=localhost:{port}",
        )
        read = read_by(one, command, of_core, OF_A_CLIENT)
    assert lies("triton_grpc python", command, read) == {}
