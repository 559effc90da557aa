"""vLLM's context and generation servers as ranks of the run, with KV caches handed over by NIXL."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.clusters import UnderSlurm, or_skip
from tests.helpers.owned import guards, started_at
from tests.helpers.peer_programs import (
    DISAGG,
    LENGTH,
    TIMEOUT_S,
    VLLM,
    Show,
    offline,
    options,
    processes,
    server,
)
from tests.helpers.support import DONE, INSTANCE_LOST, Starter, descendants
from tools.slurm import slurm

pytestmark = [pytest.mark.peers, pytest.mark.usefixtures("nixl")]

N = 40


def test_one_context_server_and_two_that_generate(
    model: Path, prompts: Callable[[int], Path], one: Starter, show: Show
) -> None:
    data = options(model, prompts(N))
    ours = offline(one, "ours", "torch", *data)
    words = (*DISAGG, "--min_duration", 0, "--save_outputs", "--log_dir", one.folder / "theirs")
    command = one.start(4, *data, *words, core="trtllm_endpoint", log_dir=one.folder / "theirs")
    ended = command.end(TIMEOUT_S).must(DONE)
    theirs = {line["index"]: line["output_tokens"] for line in ended.outputs()}
    equal = sum(theirs[index] == tokens for index, (tokens, _) in ours.items())
    clients = ended.result["per_instance"]
    handed = sum(client["handed_over"] for client in clients)
    transfers = sum(client["server_transfers"] for client in clients)
    failed = sum(client["server_failed_transfers"] for client in clients)
    show(
        f"1 + 2 x vLLM as ranks: Offline {ended.result['status']}; {equal} of {N} answers have our tokens;"
        f" {handed} contexts handed over, {transfers:.0f} transfers, {failed:.0f} failed"
    )
    assert (ended.result["status"], ended.result["errors"]) == ("VALID", 0) and equal == N
    assert handed == transfers == N and failed == 0
    assert min(client["samples"] for client in clients) > 0
    assert not any("transfer" in doubt or "prefix" in doubt for doubt in ended.result["doubts"])


def test_server_scenario(model: Path, prompts: Callable[[int], Path], one: Starter, show: Show) -> None:
    result = server(one, 64, *options(model, prompts(64)), *DISAGG, ranks=4)
    handed = sum(client["handed_over"] for client in result["per_instance"])
    transfers = sum(client["server_transfers"] for client in result["per_instance"])
    show(
        f"1 + 2 x vLLM as ranks: Server VALID, first token p50 {result['ttft_ms']['p50']:.0f} ms,"
        f" {handed} contexts handed over, {transfers:.0f} transfers"
    )
    assert handed == transfers == result["samples"]


@pytest.mark.slurm
def test_under_slurm(
    model: Path,
    prompts: Callable[[int], Path],
    one: Starter,
    in_path: dict[str, str],
    show: Show,
) -> None:
    """The generation server takes KV caches from another node's context server."""
    n = 16
    data = options(model, prompts(n))
    ours = offline(one, "ours", "torch", *data)
    words = ("--num_gen_servers", 1, "--min_duration", 0, "--save_outputs")
    with or_skip(slurm(2)) as cluster:
        under, folder = UnderSlurm(cluster, one), one.folder / "run"
        line = ("run", *data, *DISAGG, *words, "--log_dir", folder)
        ended = under.start(["-n", 3, "-N", 2], *line, env=in_path).end(TIMEOUT_S).must(DONE)
    nodes = [rank["node"] for rank in ended.json("plan.json")["ranks"] if "server" in rank["roles"]]
    equal = sum(line["output_tokens"] == ours[line["index"]][0] for line in ended.outputs())
    transfers = sum(client["server_transfers"] for client in ended.result["per_instance"])
    show(
        f"1 + 1 x vLLM on nodes {nodes} of a Slurm: Offline {ended.result['status']}; {equal} of {n}"
        f" answers have our tokens; {transfers:.0f} transfers"
    )
    assert nodes == ["h1", "h2"] and (ended.result["status"], ended.result["errors"]) == ("VALID", 0)
    assert equal == transfers == n


def test_contexts_that_are_computed_again(
    model: Path, prompts: Callable[[int], Path], one: Starter, show: Show
) -> None:
    """No KV cache can be taken, and vLLM makes the best of it: LoadGen says VALID, the run INVALID."""
    halves = "context_servers: {dtype: bfloat16}\ngeneration_servers: {dtype: float32}\n"
    (one.folder / "halves.yaml").write_text(halves)
    data = ("--dataset_path", prompts(8), "--model_path", model, "--max_output_len", LENGTH)
    kv = '{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'
    words = (*VLLM, "--min_duration", 0, f"--server_args=--enforce-eager --kv-transfer-config '{kv}'")
    command = one.start(3, *data, *words, "--disagg_config", "halves.yaml", core="trtllm_endpoint")
    ended = command.end(TIMEOUT_S).must(DONE)
    show(f"no transfer succeeds: LoadGen {ended.result['loadgen_result']}; {ended.result['doubts']}")
    assert (ended.result["status"], ended.result["loadgen_result"]) == ("INVALID", "VALID")
    assert any("transfers of KV caches" in doubt for doubt in ended.result["doubts"])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_context_server_that_is_killed_in_the_test(
    number: int, model: Path, prompts: Callable[[int], Path], one: Starter, show: Show
) -> None:
    more = ("--min_duration", 120, "--num_gen_servers", 1)
    command = one.start(3, *options(model, prompts(N)), *DISAGG, *more, core="trtllm_endpoint")
    command.wait_phase("test", TIMEOUT_S)
    (context,) = processes(command, b"VLLM::EngineCore", b"kv_producer")
    tree = [pid for guard in guards(command) for pid in (guard, *descendants(guard))]
    started = {pid: started_at(pid) for pid in tree}
    os.kill(context, number)
    at = time.monotonic()
    ended = command.end(120, lingers=15).must(INSTANCE_LOST)
    show(f"{signal.Signals(number).name}, ended {time.monotonic() - at:.1f} s later: {ended.message}")
    how = f"is stopped: kill -CONT {context}" if number == signal.SIGSTOP else "(SIGKILL)"
    assert "(vllm, context): " in ended.message and how in ended.message, repr(ended)
    assert not [pid for pid, since in started.items() if since and started_at(pid) == since]
