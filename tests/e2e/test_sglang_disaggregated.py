"""SGLang's context and generation servers that ranks start and own, by a fake of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.answers import wait_for_answers
from tests.helpers.owned import OUTPUT, TEST, processes, put_in_path
from tests.helpers.scripted_server import answer_of
from tests.helpers.support import DONE, INSTANCE_LOST, Command, Starter, make_samples

N = 40
DISAGG: tuple[object, ...] = ("--mode", "disaggregated", "--server", "sglang", "--max_batch_size", 4)


@pytest.fixture(autouse=True)
def in_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a program `sglang` in PATH that speaks its protocol."""
    put_in_path(tmp_path, monkeypatch, "sglang")


def start(one: Starter, *options: object) -> tuple[Command, list[list[int]]]:
    samples = make_samples(one.folder / "samples.jsonl", range(1, N + 1))
    words = [*TEST, "--dataset_path", samples.path, "--model_path", one.folder, *DISAGG, *options]
    return one.start(4, *words, core="trtllm_endpoint"), samples.prompts


def test_both_servers_get_each_request(one: Starter) -> None:
    command, prompts = start(one)
    ended = command.end(120).must(DONE)
    outputs = {line["index"]: line["output_tokens"] for line in ended.outputs()}
    assert outputs == {i: answer_of(prompt, OUTPUT) for i, prompt in enumerate(prompts)}
    result = ended.result
    assert not [doubt for doubt in result["doubts"] if not doubt.startswith("disturbed")]
    clients: list[dict[str, Any]] = result["per_instance"]
    handed = [client["handed_over"] for client in clients]
    assert sum(handed) == clients[0]["server_context_transfers"] == N and min(handed) > 0
    assert clients[0]["server_context_prompt_tokens"] == sum(map(len, prompts))
    checks = result["server_checks"]
    assert checks["server_totals"] == checks["contexts_arrived"] == ""
    assert "whether generation servers got all KV caches" not in ended.out
    assert clients[0]["frameworks"] == ["SGLang 0.0"]
    plan = ended.json("plan.json")["ranks"]
    owners = [rank["roles"] for rank in plan if "server" in rank["roles"]]
    assert owners == [["server", "ctx"], ["server", "executor"], ["server", "executor"]]
    modes = ["prefill", "decode", "decode"]
    logs = [(ended.log_dir / f"server_{index}.log").read_text() for index in range(3)]
    assert [f"--disaggregation-mode {mode}" in log for log, mode in zip(logs, modes, strict=True)] == [
        True
    ] * 3


def test_a_prefill_that_fails(one: Starter) -> None:
    """The generation server waits for its KV cache: the message names both."""
    command, _ = start(one, "--server_args=--loses")
    ended = command.end(60)
    assert ended.code not in (DONE, 2)
    assert "Prefill transfer failed" in ended.message
    assert "; generation server: http://127.0.0.1:" in ended.message, repr(ended)


@pytest.mark.parametrize("whose", ["context", "generation"])
def test_a_server_that_is_killed_in_the_test(one: Starter, whose: str) -> None:
    command, _ = start(one, "--server_args=--pause-s 0.3")
    wait_for_answers(command, 4)
    mode = b"prefill" if whose == "context" else b"decode"
    os.kill(processes(command, mode)[0], signal.SIGKILL)
    ended = command.end(60).must(INSTANCE_LOST)
    assert f"(sglang, {whose}): " in ended.message and "(SIGKILL)" in ended.message, repr(ended)
    failed = ended.result["failures"][0]
    assert failed["rank"] == 1 if whose == "context" else failed["rank"] in (2, 3)


def test_a_generation_server_that_is_started_again(one: Starter) -> None:
    """Its open requests end at the context server, and begin again in other rooms."""
    more = ("--server_args=--pause-s 0.3", "--on_instance_loss", "restart")
    command, prompts = start(one, *more)
    wait_for_answers(command, 4)
    os.kill(processes(command, b"decode")[0], signal.SIGKILL)
    ended = command.end(120).must(DONE)
    outputs = {line["index"]: line["output_tokens"] for line in ended.outputs()}
    assert outputs == {i: answer_of(prompt, OUTPUT) for i, prompt in enumerate(prompts)}
