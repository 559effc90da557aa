"""Context and generation servers that ranks start and own: who is asked what, and what is said of it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.answers import wait_for_answers
from tests.helpers.make_checkpoint import make_tokenizer
from tests.helpers.owned import SYNTHETIC, TEST, client, processes, put_in_path
from tests.helpers.scripted_server import answer_of
from tests.helpers.small_vllm import ENDS_AT_ONCE
from tests.helpers.support import DONE, INSTANCE_LOST, Command, Ended, Starter, make_samples

N, OUTPUT = 64, 6
DISAGG: tuple[object, ...] = ("--mode", "disaggregated", "--server", "vllm", "--max_batch_size", 4)


@pytest.fixture(autouse=True)
def in_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a program `vllm` in PATH that speaks its protocol."""
    put_in_path(tmp_path, monkeypatch, "vllm")


def start(
    one: Starter, ranks: int, *options: object, lengths: range = range(1, N + 1), **more: Any
) -> tuple[Command, list[list[int]]]:
    samples = make_samples(one.folder / "samples.jsonl", lengths)
    words = [*TEST, "--dataset_path", samples.path, "--model_path", one.folder, *DISAGG, *options]
    return one.start(ranks, *words, core="trtllm_endpoint", **more), samples.prompts


def doubts_of_servers(ended: Ended) -> list[str]:
    """Return what is doubtful of a test, but for what else runs on this machine."""
    return [doubt for doubt in ended.result["doubts"] if not doubt.startswith("disturbed")]


def expected(prompts: list[list[int]]) -> dict[int, list[int]]:
    """Return the answers, of which some end with the context server's token."""
    return {
        i: answer_of(prompt, OUTPUT if len(prompt) % ENDS_AT_ONCE else 1) for i, prompt in enumerate(prompts)
    }


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (4, ("--num_ctx_servers", 1)),
        (8, ("--num_ctx_servers", 2, "--clients_per_server", 2, "--control_ranks", 2)),
    ],
)
def test_contexts_are_handed_over(one: Starter, ranks: int, more: tuple[object, ...]) -> None:
    command, prompts = start(one, ranks, *more)
    ended = command.end(120).must(DONE)
    n_contexts = int(str(more[1]))
    n_at_once = sum(len(answer) == 1 for answer in expected(prompts).values())
    outputs = {line["index"]: line["output_tokens"] for line in ended.outputs()}
    assert outputs == expected(prompts)
    result = ended.result
    assert result["mode"] == "disaggregated" and result["retried"] == 0
    assert not doubts_of_servers(ended)
    clients = result["per_instance"]
    handed = [client["handed_over"] for client in clients]
    assert sum(handed) == N - n_at_once and min(handed) > 0
    assert sum(client.get("server_transfers", 0) for client in clients) == N - n_at_once
    assert clients[0]["server_context_prompt_tokens"] == sum(map(len, prompts))
    assert {*result["server_checks"].values()} <= {"", None}
    assert result["server_checks"]["server_totals"] == ""
    assert clients[0]["frameworks"] == ["vLLM 0.0"]
    plan = ended.json("plan.json")["ranks"]
    owners = [rank["roles"] for rank in plan if "server" in rank["roles"]]
    assert owners == [["server", "ctx"]] * n_contexts + [["server", "executor"]] * 2
    assert "server 0 (vllm, context): rank" in ended.out
    logs = [(ended.log_dir / f"server_{index}.log").read_text() for index in range(len(owners))]
    assert all(("kv_producer" in log) == (i < n_contexts) for i, log in enumerate(logs))


@pytest.mark.smoke
def test_contexts_that_are_computed_again(one: Starter) -> None:
    """LoadGen calls it VALID; the run is not."""
    options = ("--server_args=--loses", "--test_mode", "PerformanceOnly", "--min_duration", 0)
    command, _ = start(one, 3, *options, lengths=range(1, 7))
    ended = command.end(120).must(DONE)
    n = sum(client["handed_over"] for client in ended.result["per_instance"])
    assert (ended.result["status"], ended.result["loadgen_result"]) == ("INVALID", "VALID") and n > 0
    failed, lacking = doubts_of_servers(ended)
    assert failed.startswith(f"{n:,} transfers of KV caches failed"), failed
    assert lacking.startswith("generation server http://127.0.0.1:"), lacking
    assert f"counts 0 transfers of KV caches for {n:,} requests with one" in lacking, lacking
    assert ended.out.count("REFUSED") == 2


def test_a_context_server_that_hands_nothing_over(one: Starter) -> None:
    command, _ = start(one, 3, "--server_args=--hides")
    ended = command.end(60)
    assert ended.code not in (DONE, 2)
    assert "its answer has no kv_transfer_params, so there is no KV cache to transfer" in ended.message


@pytest.mark.parametrize(
    ("whose", "number"),
    [("context", signal.SIGKILL), ("context", signal.SIGSTOP), ("generation", signal.SIGKILL)],
)
def test_a_server_that_is_killed_or_stopped_in_the_test(one: Starter, whose: str, number: int) -> None:
    command, _ = start(one, 4, "--server_args=--pause-s 0.3")
    wait_for_answers(command, 4)
    role = b"kv_producer" if whose == "context" else b"kv_consumer"
    victim = processes(command, role)[0]
    os.kill(victim, number)
    ended = command.end(60).must(INSTANCE_LOST)
    assert f"(vllm, {whose}): " in ended.message, repr(ended)
    how = f"is stopped: kill -CONT {victim}" if number == signal.SIGSTOP else "(SIGKILL)"
    assert how in ended.message, repr(ended)
    failed = ended.result["failures"][0]
    assert failed["rank"] == 1 if whose == "context" else failed["rank"] in (2, 3)


def test_a_generation_server_that_the_run_can_do_without(one: Starter) -> None:
    more = ("--server_args=--pause-s 0.3", "--on_instance_loss", "continue", "--grace", 1.5)
    command, prompts = start(one, 4, *more)
    wait_for_answers(command, 4)
    os.kill(processes(command, b"kv_consumer")[0], signal.SIGKILL)
    ended = command.end(120).must(DONE)
    assert dict(ended.accuracy_log()) == expected(prompts) and len(ended.accuracy_log()) == N
    (lost,) = ended.result["lost"]
    assert "(vllm, generation): was ended by signal 9 (SIGKILL)" in lost["cause"]


def test_another_client_goes_through_the_run(one: Starter) -> None:
    """It knows nothing of halves: the stand-in refuses what it would ask them."""
    make_tokenizer(one.folder)
    command = one.start(3, *SYNTHETIC, "--model_path", one.folder, *DISAGG, *client(), core="trtllm_endpoint")
    ended = command.end(120).must(DONE)
    assert "through the run's own endpoint" in ended.out
    assert ended.result["harness"]["completed"] == ended.result["samples"] > 0
    assert sum(instance["handed_over"] for instance in ended.result["per_instance"]) > 0


def test_own_serve(one: Starter) -> None:
    """The answers are those of an engine in the ranks."""
    samples = make_samples(one.folder / "samples.jsonl", range(3, 43))
    data = [*TEST, "--dataset_path", samples.path, "--model_path", "tiny-llama", "--max_seq_len", 256]
    tokens = []
    for name, ranks, core, more in (
        ("ours", 2, "torch", ()),
        ("theirs", 4, "trtllm_endpoint", ("--server", "mpillm", "--mode", "disaggregated")),
    ):
        folder = one.folder / name
        command = one.start(ranks, *data, *more, "--log_dir", folder, core=core, log_dir=folder)
        ended = command.end(180).must(DONE)
        tokens.append({line["index"]: line["output_tokens"] for line in ended.outputs()})
    assert tokens[0] == tokens[1] and len(tokens[1]) == 40
    per_instance = ended.result["per_instance"]
    handed, counted = (
        sum(one_[name] for one_ in per_instance) for name in ("handed_over", "server_transfers")
    )
    assert handed == counted > 0 and "not checked" not in ended.out
