"""Runs whose load is conversations: each request follows the previous response, and its delay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpillm.data.tokenizer import ByteTokenizer
from mpillm.report.request_log import read_requests
from tests.helpers.support import DONE, USAGE, Ended, Starter

DELAY_S = 0.05
N_TURNS = (3, 1, 2)
CONVERSATIONS = ("--harness", "conversations", "--max_output_len", 6, "--save_outputs")


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    """Return a file of conversations with recorded responses."""
    rows: list[dict[str, Any]] = []
    for name, n_turns in zip("xyz", N_TURNS, strict=True):
        for turn in range(n_turns):
            row = {"conversation_id": name, "turn": 2 * turn + 1, "role": "user", "content": f"{name}{turn}"}
            rows.append({**row, "delay_seconds": DELAY_S} if turn else row)
            rows.append({**row, "turn": 2 * turn + 2, "role": "assistant", "content": "yes"})
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def outputs_of(ended: Ended) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the lines of outputs.jsonl, by conversation and turn."""
    lines = [json.loads(line) for line in (ended.log_dir / "outputs.jsonl").read_text().splitlines()]
    return {(line["conversation"], line["turn"]): line for line in lines}


def check_order(ended: Ended) -> None:
    """Each later request was sent when the previous response and the delay were over, and soon after."""
    rows = read_requests(ended.log_dir)
    rows = rows[np.argsort(rows["index"])]
    assert rows["index"].tolist() == [*range(sum(N_TURNS))]
    firsts = {0, *np.cumsum(N_TURNS).tolist()}
    for i in range(1, len(rows)):
        if i not in firsts:
            assert rows["issued"][i] >= rows["issued"][i - 1] + rows["latency"][i - 1] + DELAY_S - 1e-3


@pytest.mark.parametrize("mode", ["aggregated", "disaggregated"])
def test_recorded_conversations(both: Starter, talks: Path, mode: str) -> None:
    table = both.folder / "requests.csv"
    words = ["--mode", mode, *CONVERSATIONS, "--dataset_path", talks, "--concurrency", 2]
    ended = both.run(3, *words, "--requests_file", table).must(DONE)
    result = ended.result
    assert (result["status"], result["samples"], result["errors"]) == ("MEASURED", 6, 0)
    figures = result["conversations"]
    assert (figures["started"], figures["ended"], figures["failed"], figures["history"]) == (
        3,
        3,
        0,
        "recorded",
    )
    assert figures["first_turns"]["requests"] + figures["later_turns"]["requests"] <= 6
    check_order(ended)
    head, *lines = table.read_text().splitlines()
    assert head.startswith("sample,conversation,turn,issued_s,ttft_s") and len(lines) == 6
    assert f"requests {table}" in " ".join(ended.flowing.split())
    prompt = bytes(outputs_of(ended)["x", 2]["input_tokens"]).decode()
    assert prompt == "x0\nyes\nx1\nyes\nx2"
    assert "3 conversations, 2 at a time; responses in later prompts are those recorded" in ended.flowing


def test_a_sweep_of_conversations(one: Starter, talks: Path, tmp_path: Path) -> None:
    load = ("--harness", "conversations", "--dataset_path", talks, "--max_output_len", 6)
    words = ("-n", 2, "--core_type", "dummy", *load, "--concurrency", 1, 3, "--goodput", "ttft:60000")
    file = tmp_path / "sweep.json"
    ended = one.mpillm("sweep", *words, "--log_dir", tmp_path / "sweep", "--output", file).must(0)
    for point in json.loads(file.read_text())["points"]:
        assert (point["status"], point["good_conversations_share"]) == ("MEASURED", 1.0)
        assert point["e2e_avg_interactivity"] > 0
    assert "good conversations, share" in ended.out


def test_generated_responses(one: Starter, talks: Path) -> None:
    ended = one.run(2, *CONVERSATIONS, "--dataset_path", talks, "--history", "generated").must(DONE)
    check_order(ended)
    outputs = outputs_of(ended)
    for name, n_turns in zip("xyz", N_TURNS, strict=True):
        expected = f"{name}0"
        for turn in range(n_turns):
            output = outputs[name, turn]
            assert ByteTokenizer().decode(output["input_tokens"]) == expected
            expected += f"\n{ByteTokenizer().decode(output['output_tokens'])}\n{name}{turn + 1}"


def test_a_conversation_that_outgrows_the_model_ends(one: Starter, talks: Path) -> None:
    limit = ("--model_path", "tiny-llama", "--max_seq_len", 16, "--history", "generated")
    ended = one.run(2, *CONVERSATIONS, "--dataset_path", talks, *limit, core="torch").must(DONE)
    figures = ended.result["conversations"]
    assert (figures["ended"], figures["failed"]) == (3, 0) and figures["outgrown"] >= 1
    assert figures["requests_skipped"] >= figures["outgrown"]
    assert "the next prompt did not fit the model" in ended.flowing


def test_messages_for_a_chat_server(one: Starter, talks: Path) -> None:
    options = ("--server=mpillm", "--model_path=tiny-llama", "--endpoint_type=chat", "--history=generated")
    words = [*CONVERSATIONS[:-1], "--dataset_path", talks, *options]
    ended = one.run(2, *words, core="trtllm_endpoint", timeout=120).must(DONE)
    result = ended.result
    assert (result["samples"], result["errors"], result["conversations"]["ended"]) == (6, 0, 3)
    check_order(ended)
    (server,) = result["per_instance"][0]["servers"]
    assert (server["answers"], server["generated_tokens"], result["tokens"]) == (6, 36, 36)
    assert result["prompt_tokens"]["max"] > 0  # as the server counts


@pytest.mark.parametrize(
    ("salt", "shares"),
    [("test", [True, True]), ("conversation", [False, True]), ("request", [False, False])],
)
def test_salts_separate_cached_prompts(one: Starter, tmp_path: Path, salt: str, shares: list[bool]) -> None:
    """Of two conversations that begin alike: does the second one find the first, and a later turn its own?"""
    rows = [
        {"session_id": name, "turns": [{"text": text} for text in ("a long beginning", "and more")]}
        for name in "xy"
    ]
    file = tmp_path / "alike.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cache = ("--enable_kv_cache_reuse", "--tokens_per_block", BLOCK, "--cache_salt", salt)
    words = [*CONVERSATIONS, "--dataset_path", file, "--model_path", "tiny-llama", "--concurrency", 1]
    ended = one.run(2, *words, *cache, core="torch", timeout=120).must(DONE)
    _, own, first, _ = read_requests(ended.log_dir)["cached"].tolist()
    assert [first > 0, own > 0] == shares


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cache_salt", "conversation"], "--cache_salt conversation needs --harness conversations"),
        (["--harness", "conversations"], "name a file of conversations with --dataset_path"),
        (["--history", "generated"], "--history generated has no effect without --harness conversations"),
        (["--requests_file", "a.json"], "--requests_file a.json: name a file that ends in .csv or .parquet"),
        (["--endpoint_type", "chat"], "--endpoint_type chat has no effect on the dummy core"),
    ],
)
def test_what_is_wrong(one: Starter, words: list[str], message: str) -> None:
    assert message in one.run(2, *words).must(USAGE).message


BLOCK = 4


def longest_prefix(prompt: list[int], computed: list[list[int]]) -> int:
    """Return how many tokens of whole blocks are in a cache of these sequences, without the last token."""
    longest = 0
    for tokens in computed:
        same = [a == b for a, b in zip(prompt[:-1], tokens, strict=False)]
        longest = max(longest, same.index(False) if False in same else len(same))
    return longest // BLOCK * BLOCK


@pytest.mark.parametrize("history", ["recorded", "generated"])
@pytest.mark.parametrize(
    ("ranks", "mode", "instances"),
    [(2, "aggregated", 1), (4, "aggregated", 3), (4, "disaggregated", 3)],
    ids=["one", "three", "handoff"],
)
def test_cached_tokens_of_each_turn(
    one: Starter, talks: Path, history: str, ranks: int, mode: str, instances: int
) -> None:
    """They are those of an independent count, with the conversations' instances found by session."""
    cache = ("--enable_kv_cache_reuse", "--tokens_per_block", BLOCK, "--seed", 1)
    session = ("--traffic_distribution_policy", "conversation", "--concurrency", 1)
    words = [*CONVERSATIONS, "--dataset_path", talks, "--model_path", "tiny-llama", "--history", history]
    words += ["--mode", mode, *(("--num_ctx_servers", 2) if mode == "disaggregated" else ())]
    ended = one.run(ranks, *words, *cache, *session, core="torch", timeout=120).must(DONE)
    outputs = outputs_of(ended)
    places = [(name, turn) for name, n in zip("xyz", N_TURNS, strict=True) for turn in range(n)]
    rows = read_requests(ended.log_dir)
    computed: dict[str, list[list[int]]] = {}
    expected = []
    for name, turn in (places[index] for index in rows["index"].tolist()):
        prompt, response = (outputs[name, turn][part] for part in ("input_tokens", "output_tokens"))
        # One conversation at a time and prompts that begin differently: only a conversation's own count.
        own = computed.setdefault(name, [])
        expected.append([len(prompt), longest_prefix(prompt, own)])
        # A context instance does not get the tokens that a generation instance generates.
        own.append(prompt if mode == "disaggregated" else [*prompt, *response[:-1]])
    assert rows[["prompt", "cached"]].tolist() == list(map(tuple, expected))
    assert ended.result["prompt_tokens"]["max"] == max(n for n, _ in expected)
    of = ended.result["conversations"]
    assert of["first_turns"]["cached_share"] == 0.0 and 0 < of["later_turns"]["cached_share"] < 1
    assert len(ended.result["per_instance"]) == instances
    page = (ended.log_dir / "report.html").read_text()
    assert "cached prompt tokens" in ended.flowing and "cached prompt tokens" in page
