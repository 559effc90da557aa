"""vLLM as ranks of the run: `--server=vllm` starts it, and every end of it is named."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mpillm.data.tokenizer import load_tokenizer
from mpillm.programs.servers.kind import ServerNode, ServerSpec
from mpillm.programs.servers.kinds import kind_of
from tests.helpers.answers import wait_for_answers
from tests.helpers.clusters import OnHosts, UnderSlurm, or_skip
from tests.helpers.make_checkpoint import make_checkpoint
from tests.helpers.peer_programs import (
    EAGER,
    TIMEOUT_S,
    VLLM,
    Program,
    Show,
    offline,
    options,
    processes,
    server,
    tiny_llama,
)
from tests.helpers.support import DONE, Starter, make_samples
from tests.random_server_faults import Round, play
from tools.hosts import hosts
from tools.slurm import slurm

pytestmark = [pytest.mark.peers, pytest.mark.usefixtures("in_path")]

END = 2  # of its answers
TINY: tuple[object, ...] = (*EAGER, "--load_format", "dummy")

TRANSFORMERS: tuple[object, ...] = (
    "--server",
    "command:transformers serve --device cpu --dtype float32 --host {host} --port {port}",
)


@pytest.mark.parametrize("ranks", [2, 3])
def test_vllm(ranks: int, model: Path, prompts: Callable[[int], Path], one: Starter, show: Show) -> None:
    """One and two instances: every answer has the tokens of ours."""
    n = 160 if ranks == 2 else 40
    data = options(model, prompts(n))
    ours = offline(one, "ours", "torch", *data)
    words = ("--min_duration", 0, "--save_outputs", "--log_dir", one.folder / "theirs")
    command = one.start(ranks, *data, *VLLM, *words, core="trtllm_endpoint", log_dir=one.folder / "theirs")
    ended = command.end(TIMEOUT_S).must(DONE)
    theirs = {line["index"]: line["output_tokens"] for line in ended.outputs()}
    equal = sum(theirs[index] == tokens for index, (tokens, _) in ours.items())
    show(f"{ranks - 1} x vLLM as ranks: Offline VALID; {equal} of {n} answers have our tokens")
    assert (ended.result["status"], ended.result["errors"]) == ("VALID", 0) and equal == n
    for instance in ended.result["per_instance"]:
        assert instance["frameworks"] == ["vLLM 0.32.0"] and instance["server_cached_tokens"] == 0
        assert instance["server_generated_tokens"] == instance["tokens"]
    assert "prefix cache" not in ended.out


def test_its_parser_has_our_options(program: Program) -> None:
    """Each by its name, whatever values and roles ask for it."""
    (packages,) = program("vllm").parents[1].glob("lib/python*/site-packages")
    files = [packages / "vllm/engine/arg_utils.py", *(packages / "vllm/entrypoints").rglob("cli_args.py")]
    text = "".join(path.read_text() for path in files)
    known = {*re.findall(r'"(--[a-z][a-z-]+)"', text)}
    known |= {f"--{name.replace('_', '-')}" for name in re.findall(r"^    ([a-z_]+): ", text, re.M)}
    kind, made = kind_of("vllm"), set[str]()
    for on in (False, True):
        values = {name: {"dtype": "bfloat16", "load_format": "dummy"}.get(name, 2) for name in kind.options}
        values |= {"quantization": "fp8", "kv_cache_dtype": "fp8"}
        values |= {"enable_kv_cache_reuse": on, "enable_chunked_context": on}
        nodes = {"context": ServerNode(), "generation": ServerNode(), "": ServerNode(1, 2, "h", 1)}
        for role, node in nodes.items():
            ports = dict.fromkeys(kind.disagg_ports, 1)
            spec = ServerSpec(kind, "m", values, role=role, node=node, more_ports=ports)
            made.update(word for word in spec.command().argv if word.startswith("--"))
    assert len(made) > 20 and {re.sub("^--no-", "--", word) for word in made} <= known


def test_server_scenario(model: Path, prompts: Callable[[int], Path], one: Starter, show: Show) -> None:
    result = server(one, 64, *options(model, prompts(64)), *VLLM)
    show(f"vLLM as a rank: Server VALID, first token p50 {result['ttft_ms']['p50']:.0f} ms")


def over_hosts(
    one: Starter, n_hosts: int, n: int, data: Sequence[object], exports: dict[str, str], show: Show
) -> None:
    """Run a server with a part of every layer on each host; gloo carries their sums."""
    ours = offline(one, "ours", "torch", *data)
    words = ("run", *data, *VLLM, "--tensor_parallelism", n_hosts, "--server_nodes", n_hosts)
    with or_skip(hosts(n_hosts)) as made:
        on = OnHosts(made, one)
        where = ",".join(f"h{host}:{2 if host == 1 else 1}" for host in range(1, 1 + n_hosts))
        command = on.start(where, *words, "--min_duration", 0, "--save_outputs", exports=exports)
        ended = command.end(TIMEOUT_S).must(DONE)
    theirs = {line["index"]: line["output_tokens"] for line in ended.outputs()}
    equal = sum(theirs[index] == tokens for index, (tokens, _) in ours.items())
    show(
        f"vLLM, TP {n_hosts} over {n_hosts} hosts: Offline {ended.result['status']};"
        f" {equal} of {n} answers have our tokens"
    )
    assert (ended.result["status"], ended.result["errors"]) == ("VALID", 0) and equal == n


def test_tensor_parallel_over_two_hosts(one: Starter, in_path: dict[str, str], show: Show) -> None:
    """The real model has three heads of keys and values, which two can't share."""
    model = make_checkpoint(one.folder / "even", hidden_size=256, heads=4, kv_heads=2)
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    data = make_samples(one.folder / "samples.jsonl", range(9, 49))
    over_hosts(one, 2, 40, options(model, data.path), in_path, show)


def test_tensor_parallel_over_three_hosts(
    model: Path, prompts: Callable[[int], Path], one: Starter, in_path: dict[str, str], show: Show
) -> None:
    over_hosts(one, 3, 40, options(model, prompts(40)), in_path, show)


def test_a_server_that_is_started_again(
    model: Path, prompts: Callable[[int], Path], one: Starter, show: Show
) -> None:
    n = 160
    data = options(model, prompts(n))
    ours = offline(one, "ours", "torch", *data)
    words = (*VLLM, "--min_duration", 0, "--save_outputs", "--on_instance_loss", "restart")
    command = one.start(2, *data, *words, "--max_batch_size", 8, core="trtllm_endpoint")
    command.wait_phase("test", TIMEOUT_S)
    wait_for_answers(command, 8)
    os.kill(processes(command, b"VLLM::EngineCore")[0], signal.SIGKILL)
    ended = command.end(TIMEOUT_S).must(DONE)
    theirs = {line["index"]: line["output_tokens"] for line in ended.outputs()}
    equal = sum(theirs[index] == tokens for index, (tokens, _) in ours.items())
    (client,) = ended.result["per_instance"]
    (again,) = client["server"]["restarts"]
    show(
        f"vLLM's engine core killed in the test: {again['why']}, back after {again['back_after_s']} s,"
        f" {client['retries']} requests asked again; {equal} of {n} answers have our tokens"
    )
    assert ended.result["errors"] == 0 and equal == n and "(SIGKILL)" in again["why"]


def test_an_unwanted_prefix_cache_is_found(model: Path, one: Starter, tmp_path: Path, show: Show) -> None:
    """vLLM's default, which `--server=vllm` turns off, found by vLLM's own count."""
    ids = [100 + i % 50 for i in range(400)]  # its blocks on CPUs have 128 tokens
    (data := tmp_path / "same.jsonl").write_text(
        "".join(json.dumps({"input_tokens": [*ids, i]}) + "\n" for i in range(8))
    )
    words = (*options(model, data), "--min_duration", 0, "--max_batch_size", 2)
    cached = "--server_args=--enforce-eager --enable-prefix-caching"
    command = one.start(2, *words, *VLLM, cached, core="trtllm_endpoint")
    ended = command.end(TIMEOUT_S).must(DONE)
    (doubt,) = [doubt for doubt in ended.result["doubts"] if "prefix cache" in doubt]
    show(f"with vLLM's prefix cache: LoadGen {ended.result['loadgen_result']}; {doubt}")
    assert "prompt tokens came from a server's prefix cache, which MLPerf forbids" in doubt
    assert (ended.result["status"], ended.result["loadgen_result"]) == ("INVALID", "VALID")


def test_a_server_that_none_of_us_wrote(
    model: Path, prompts: Callable[[int], Path], one: Starter, program: Program, show: Show
) -> None:
    """mpillm knows nothing of `transformers serve` but its command line."""
    program("transformers")
    n = 40
    data = ("--dataset_path", prompts(n), "--model_path", model, "--max_output_len", 16)
    ours = offline(one, "ours", "torch", *data, "--dtype", "float32")
    own = (*TRANSFORMERS, "--core_options", f"model:{model}")
    theirs = offline(one, "theirs", "trtllm_endpoint", *data, *own)
    tokenizer = load_tokenizer(model, apply_chat_template=False)

    def text(tokens: list[int]) -> str:
        return tokenizer.decode([token for token in tokens if token != END])

    texts = sum(text(tokens) == text(theirs[index][0]) for index, (tokens, _) in ours.items())
    show(f"transformers serve as a rank: Offline VALID; {texts} of {n} answers have our text")
    assert len(theirs) == texts == n


def test_two_runs_at_once(one: Starter, show: Show) -> None:
    """vLLM takes ports of its own besides, for its processes."""
    data = make_samples(one.folder / "samples.jsonl", range(9, 41))
    model = tiny_llama(one.folder / "tiny")
    words = ("--dataset_path", data.path, "--model_path", model, "--min_duration", 0, "--max_output_len", 8)
    folders = [one.folder / f"run{index}" for index in range(2)]
    runs = [one.start(2, *words, *TINY, core="trtllm_endpoint", log_dir=folder) for folder in folders]
    results = [command.end(TIMEOUT_S).must(DONE).result for command in runs]
    ports = [re.findall(r"--port (\d+)", (folder / "server_0.log").read_text()) for folder in folders]
    show(f"two runs of vLLM at once: ports {ports}")
    assert all((result["status"], result["errors"]) == ("VALID", 0) for result in results)
    assert len({port for (port,) in ports}) == 2


@pytest.mark.slurm
@pytest.mark.parametrize("kind", ["vllm", "transformers"])
def test_under_slurm(
    kind: str, model: Path, program: Program, one: Starter, in_path: dict[str, str], show: Show
) -> None:
    """srun on two nodes, each with a vLLM; or one with `transformers serve`, beside one with rank 0."""
    program(kind)
    data = make_samples(one.folder / "samples.jsonl", range(9, 41))
    words = ("--dataset_path", data.path, "--min_duration", 0, "--max_output_len", 8)
    if kind == "vllm":
        ranks, own = 3, (*TINY, "--model_path", tiny_llama(one.folder / "tiny"))
    else:
        ranks, own = 2, (*TRANSFORMERS, "--core_options", f"model:{model}", "--model_path", model)
    with or_skip(slurm(2)) as cluster:
        under, folder = UnderSlurm(cluster, one), one.folder / "run"
        command = under.start(["-n", ranks, "-N", 2], "run", *words, *own, "--log_dir", folder, env=in_path)
        ended = command.end(TIMEOUT_S).must(DONE)
    owners = [rank["node"] for rank in ended.json("plan.json")["ranks"] if "server" in rank["roles"]]
    samples = [client["samples"] for client in ended.result["per_instance"]]
    show(f"{kind} on nodes {owners} of a Slurm: Offline {ended.result['status']}, {samples} samples")
    assert owners == ["h1", "h2"][2 - len(samples) :] and len(samples) == ranks - 1
    assert (ended.result["status"], ended.result["errors"]) == ("VALID", 0)
    assert sum(samples) == 32 and min(samples) > 0


@pytest.mark.parametrize("seed", range(3))
def test_random_faults(seed: int, tmp_path: Path, show: Show) -> None:
    show(str(play(Round.of(seed, "vllm"), tmp_path)))
