"""Runs whose load is conversations: each request follows the previous response, and its delay."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpillm.data.tokenizer import ByteTokenizer
from mpillm.report.request_log import read_requests
from tests.helpers.answers import wait_for_answers
from tests.helpers.instance_loss import GRACE, signal_rank
from tests.helpers.responses_server import TEXT, responses
from tests.helpers.scripted_server import MODEL, Reply, Request, ScriptedServer, good, plain
from tests.helpers.support import DONE, ROOT, USAGE, Ended, Starter

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
    assert result["latency_ms"]["p50"] > 0 and result["latency_ms"]["p99"] is None, "six requests are too few"
    check_order(ended)
    head, *lines = table.read_text().splitlines()
    assert head.startswith("sample,conversation,session,turn,issued_s,ttft_s") and len(lines) == 6
    assert f"requests {table}" in " ".join(ended.flowing.split())
    prompt = bytes(outputs_of(ended)["x", 2]["input_tokens"]).decode()
    assert prompt == "x0\nyes\nx1\nyes\nx2"
    assert "3 conversations, 2 at a time; responses in later prompts are those recorded" in ended.flowing


def test_instances_share_the_requests(one: Starter) -> None:
    """A request that comes later does not look like the last one of a test whose requests all exist."""
    words = ["--synthetic_conversations", "turns=5,input=9,output=5", "--num_conversations", 20]
    ended = one.run(3, *CONVERSATIONS[:-1], *words, "--concurrency", 4).must(DONE)
    counts = [instance["samples"] for instance in ended.result["per_instance"]]
    assert sum(counts) == 100 and min(counts) >= 25


def test_answers_in_one_piece_have_no_times_of_first_tokens(one: Starter, talks: Path) -> None:
    core, env = "tests.helpers.plugin_cores:Whole", {"PYTHONPATH": str(ROOT)}
    load = ("--dataset_path", talks, "--num_conversations", 30, "--concurrency", 3)
    ended = one.run(2, *CONVERSATIONS, *load, core=core, env=env).must(DONE)
    for turns in ("first_turns", "later_turns"):
        figures = ended.result["conversations"][turns]
        assert figures["ttft_ms"] is None and figures["tpot_ms"] is None and figures["latency_ms"]


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
    (place, *_) = figures["outgrown_at"]
    assert f"the next prompt did not fit the model; the first: {place}" in ended.flowing
    assert talks.name in place


def test_a_conversation_that_outgrows_a_chat_servers_model_ends(one: Starter, talks: Path) -> None:
    """Only the server counts the tokens."""
    options = ("--server=mpillm", "--model_path=tiny-llama", "--endpoint_type=chat", "--history=generated")
    words = [*CONVERSATIONS[:-1], "--dataset_path", talks, *options, "--max_seq_len", 30]
    ended = one.run(2, *words, core="trtllm_endpoint", timeout=120).must(DONE)
    figures = ended.result["conversations"]
    assert figures["failed"] == 0 and figures["outgrown"] >= 1
    assert all(doubt.startswith("disturbed") for doubt in ended.result["doubts"])
    assert f"{talks.name}:" in figures["outgrown_at"][0]


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


@pytest.mark.parametrize(("message", "code"), [("no", 400), ("too long", "context_length_exceeded")])
def test_refused_requests_are_in_no_latency(one: Starter, message: str, code: object) -> None:
    """They make the test doubtful, unless the conversations have outgrown the server's model."""

    def refuse_long(request: Request) -> Reply:
        if len(request.json["prompt"]) < 30:
            return good(request)
        return plain({"error": {"message": message, "code": code}}, "400 Bad Request")

    models = {"/v1/models": lambda _: plain({"data": [{"id": MODEL}]})}
    words = (*CONVERSATIONS[:-1], "--synthetic_conversations", "turns=3,input=20,output=6", "--seed", 1)
    with ScriptedServer(refuse_long, models) as server:
        options = ("--url", f"127.0.0.1:{server.port}", "--num_conversations", 4, "--history", "recorded")
        result = one.run(2, *words, *options, core="trtllm_endpoint").must(DONE).result
    assert (result["samples"], result["errors"]) == (8, 4)
    figures, doubts = result["conversations"], " ".join(result["doubts"])
    doubt = r"4 of 8 requests failed; the first: synthetic conversation \d, turn \d: no"
    assert bool(re.search(doubt, doubts)) == (code == 400), doubts
    assert (figures["failed"], figures["outgrown"]) == ((4, 0) if code == 400 else (0, 4))
    assert len(figures["outgrown_at"]) == (0 if code == 400 else 3)
    assert result["samples_per_second"] == pytest.approx(4 / result["test_s"], rel=0.01)


SHAPE = "turns=2-4,input=12:3,output=6,delay=0-0.05,system=16,groups=2,prefix=8"


@pytest.mark.parametrize("history", ["generated", "recorded"])
def test_synthetic_conversations(one: Starter, history: str) -> None:
    """Prompts have the shared beginnings, and the responses; the cache has both."""
    words = ["--synthetic_conversations", SHAPE, "--num_conversations", 4, "--history", history, "--seed", 3]
    cache = ("--enable_kv_cache_reuse", "--tokens_per_block", BLOCK, "--concurrency", 1)
    ended = one.run(
        2, *CONVERSATIONS, *words, "--model_path", "tiny-llama", *cache, core="torch", timeout=120
    ).must(DONE)
    figures = ended.result["conversations"]
    assert (figures["ended"], figures["failed"], figures["history"]) == (4, 0, history)
    assert figures["synthetic"] == {
        **dict(pair.split("=") for pair in SHAPE.split(",")),
        "zipf": "0",
        "num_conversations": 4,
        "seed": 3,
    }
    assert "2 to 4 (uniform) turns; input 12 ± 3 (normal) and output 6 tokens" in ended.flowing
    outputs = outputs_of(ended)
    firsts = [outputs[f"synthetic-{i}", 0]["input_tokens"] for i in range(4)]
    assert len({tuple(prompt[:16]) for prompt in firsts}) == 1
    assert firsts[0][:24] == firsts[2][:24] != firsts[1][:24] == firsts[3][:24]
    for (name, turn), output in outputs.items():
        if turn:
            before = outputs[name, turn - 1]
            prompt, response = before["input_tokens"], before["output_tokens"]
            added = output["input_tokens"][len(prompt) :]
            assert len(response) == 6, "no end token ends it"
            assert output["input_tokens"][: len(prompt)] == prompt and len(added) > 6
            assert (added[:6] == response) == (history == "generated")
    cached = read_requests(ended.log_dir)
    cached = cached[np.argsort(cached["index"])]["cached"].tolist()
    n_turns = [sum(name == f"synthetic-{i}" for name, _ in outputs) for i in range(4)]
    first = [cached[sum(n_turns[:i])] for i in range(4)]
    assert first == [0, 16, 24, 24], "the second conversation is of another group than the first"


def test_synthetic_conversations_for_a_chat_server(one: Starter) -> None:
    options = ("--server=mpillm", "--model_path=tiny-llama", "--endpoint_type=chat", "--concurrency", 2)
    words = ["--synthetic_conversations", "turns=2,input=9,output=6,system=16", "--num_conversations", 3]
    ended = one.run(2, *CONVERSATIONS[:-1], *words, *options, core="trtllm_endpoint", timeout=120).must(DONE)
    result = ended.result
    assert (result["samples"], result["errors"], result["conversations"]["ended"]) == (6, 0, 3)
    assert result["conversations"]["synthetic"]["system"] == "16"


CANCELLATION = ("--request_cancellation_rate", 40, "--request_cancellation_delay", 0.02)
LONG = ("--synthetic_conversations", "turns=3,input=10,output=300", "--max_output_len", 300)


@pytest.mark.parametrize(("ranks", "mode"), [(2, "aggregated"), (3, "disaggregated")])
def test_cancelled_requests_are_in_no_figure_and_leave_no_blocks(one: Starter, ranks: int, mode: str) -> None:
    words = ["--harness", "conversations", *LONG, "--num_conversations", 4, *CANCELLATION]
    words += ["--mode", mode, "--model_path", "tiny-llama", "--concurrency", 2]
    ended = one.run(ranks, *words, core="torch", timeout=180).must(DONE)
    result = ended.result
    n_cancelled = result["conversations"]["requests_cancelled"]
    assert n_cancelled > 0 and result["samples"] == 12 - n_cancelled and result["errors"] == 0
    assert result["tokens"] == 300 * result["samples"]
    assert (result["conversations"]["ended"], result["conversations"]["requests_skipped"]) == (4, 0)
    assert len(read_requests(ended.log_dir)) == result["samples"]
    for instance in result["per_instance"]:
        metrics = instance["metrics"]
        assert metrics["kv_cache_usage"]["last"] == metrics["running"]["last"] == 0
        assert metrics["kv_cache_usage"]["peak"] > 0
    n_generated = sum(part["metrics"]["generated_tokens"] for part in result["per_instance"])
    assert n_generated < 12 * 300, "the cancelled responses were not computed"
    assert f"cancelled {n_cancelled} requests, which are in no other figure" in ended.flowing
    assert "40 % of the requests are cancelled 0.02 s after they are sent" in ended.flowing


def test_a_cancelled_request_closes_the_servers_connection(one: Starter) -> None:
    options = ("--server=mpillm", "--model_path=tiny-llama", "--endpoint_type=chat", "--concurrency", 2)
    words = ["--harness", "conversations", *LONG, "--num_conversations", 4, *CANCELLATION, *options]
    ended = one.run(2, *words, core="trtllm_endpoint", timeout=180).must(DONE)
    result = ended.result
    n_cancelled = result["conversations"]["requests_cancelled"]
    assert n_cancelled > 0 and result["samples"] == 12 - n_cancelled and result["errors"] == 0
    (server,) = result["per_instance"][0]["servers"]
    assert (server["answers"], server["lost_tokens"]) == (result["samples"], 300 * n_cancelled)
    own = json.loads((ended.log_dir / "server_0" / "result.json").read_text())
    (instance,) = own["per_instance"]
    assert instance["metrics"]["generated_tokens"] < 12 * 300
    assert instance["metrics"]["kv_cache_usage"]["last"] == 0


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


def test_a_file_for_the_table_of_requests_needs_a_known_form(one: Starter) -> None:
    refused = one.run(2, "--requests_file", "a.json").must(USAGE)
    assert "--requests_file a.json: name a file that ends in .csv or .parquet" in refused.message


BLOCK = 4


def longest_prefix(prompt: list[int], computed: list[list[int]]) -> int:
    """Return how many tokens of whole blocks are in a cache of these sequences, without the last token."""
    longest = 0
    for tokens in computed:
        same = [a == b for a, b in zip(prompt[:-1], tokens, strict=False)]
        longest = max(longest, same.index(False) if False in same else len(same))
    return longest // BLOCK * BLOCK


def places_of(rows: NDArray[np.void]) -> list[tuple[str, int]]:
    """Return the conversation and the turn of each request."""
    places = [(name, turn) for name, n in zip("xyz", N_TURNS, strict=True) for turn in range(n)]
    return [places[index] for index in rows["index"].tolist()]


def cached_of(
    rows: NDArray[np.void], outputs: dict[tuple[str, int], dict[str, Any]], *, with_responses: bool
) -> list[int]:
    """Return how many prompt tokens of each request an earlier one has left in a cache.

    One conversation is open at a time, and prompts begin differently: only a conversation's own count.
    """
    computed: dict[str, list[list[int]]] = {}
    cached = []
    for name, turn in places_of(rows):
        prompt, response = (outputs[name, turn][part] for part in ("input_tokens", "output_tokens"))
        own = computed.setdefault(name, [])
        cached.append(longest_prefix(prompt, own))
        own.append([*prompt, *response[:-1]] if with_responses else prompt)
    return cached


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(2, ()), (3, ("--pipeline_parallelism", 2)), (3, ("--tensor_parallelism", 2))],
    ids=["one", "pp", "tp"],
)
def test_host_memory_keeps_what_the_kv_cache_cannot(
    one: Starter, talks: Path, ranks: int, layout: tuple[str | int, ...]
) -> None:
    """Conversations that come again are found again, with room for one of them in the KV cache."""
    words = [*CONVERSATIONS, "--dataset_path", talks, "--model_path", "tiny-llama", "--seed", 1, *layout]
    words += ["--num_conversations", 2 * len(N_TURNS), "--concurrency", 1, "--tokens_per_block", BLOCK]
    plain = one.run(ranks, *words, core="torch", timeout=120).must(DONE)
    cache = ("--enable_kv_cache_reuse", "--kv_cache_tokens", 32, "--max_seq_len", 32)
    host = ("--kv_host_cache_gb", 0.01)
    ended = one.run(ranks, *words, *cache, *host, core="torch", timeout=120).must(DONE)
    outputs, expected = outputs_of(ended), outputs_of(plain)
    assert {place: line["output_tokens"] for place, line in outputs.items()} == {
        place: line["output_tokens"] for place, line in expected.items()
    }
    rows = read_requests(ended.log_dir)
    assert rows["cached"].tolist() == cached_of(rows, outputs, with_responses=True)
    (instance,) = ended.result["per_instance"]
    assert instance["reused_blocks"] >= instance["loaded_blocks"] > 0


@pytest.mark.parametrize(
    ("layout", "victim"),
    [
        ((), 2),
        (("--mode", "disaggregated", "--num_ctx_servers", 1, "--max_local_prefill_length", 64), 3),
    ],
    ids=["executor", "generation"],
)
def test_tokens_outlive_an_instance(
    one: Starter, talks: Path, layout: tuple[str | int, ...], victim: int
) -> None:
    """With caches, host memory and sessions, each turn has the tokens of an instance without them."""
    words = [*CONVERSATIONS, "--dataset_path", talks, "--model_path", "tiny-llama", "--seed", 1]
    words += ["--tokens_per_block", BLOCK, "--num_conversations", 60, "--concurrency", 4]
    plain = one.run(2, *words, core="torch", timeout=120).must(DONE)
    cache = ("--enable_kv_cache_reuse", "--kv_cache_tokens", 128, "--kv_host_cache_gb", 0.01)
    loss = ("--traffic_distribution_policy", "conversation", "--on_instance_loss", "continue", *GRACE)
    log_dir = one.folder / "lost"
    command = one.start(4, *words, *layout, *cache, *loss, core="torch", log_dir=log_dir)
    wait_for_answers(command, 12)
    signal_rank(command, victim)
    ended = command.end()
    assert ended.result["samples"] == 60 * sum(N_TURNS) // len(N_TURNS) and ended.result["errors"] == 0
    (lost,) = ended.result["lost"]
    assert lost["rank"] == victim
    expected = {place: line["output_tokens"] for place, line in outputs_of(plain).items()}
    lines = [json.loads(line) for line in (ended.log_dir / "outputs.jsonl").read_text().splitlines()]
    for line in lines:
        assert line["output_tokens"] == expected[line["conversation"], line["turn"]]


@pytest.mark.parametrize("history", ["recorded", "generated"])
@pytest.mark.parametrize(
    ("ranks", "mode", "instances"),
    [(2, "aggregated", 1), (4, "aggregated", 3), (4, "disaggregated", 3), (4, "short turns", 3)],
    ids=["one", "three", "handoff", "short turns"],
)
def test_cached_tokens_of_each_turn(
    one: Starter, talks: Path, history: str, ranks: int, mode: str, instances: int
) -> None:
    """They are those of an independent count, with the conversations' instances found by session."""
    cache = ("--enable_kv_cache_reuse", "--tokens_per_block", BLOCK, "--seed", 1)
    session = ("--traffic_distribution_policy", "conversation", "--concurrency", 1)
    words = [*CONVERSATIONS, "--dataset_path", talks, "--model_path", "tiny-llama", "--history", history]
    if mode != "aggregated":
        words += ["--mode", "disaggregated", "--num_ctx_servers", 2]
    if mode == "short turns":  # the generation instance has the responses
        words += ["--max_local_prefill_length", 64]
    ended = one.run(ranks, *words, *cache, *session, core="torch", timeout=120).must(DONE)
    outputs = outputs_of(ended)
    rows = read_requests(ended.log_dir)
    # A context instance does not get the tokens that a generation instance generates.
    assert rows["cached"].tolist() == cached_of(rows, outputs, with_responses=mode != "disaggregated")
    lengths = [len(outputs[place]["input_tokens"]) for place in places_of(rows)]
    assert rows["prompt"].tolist() == lengths
    assert ended.result["prompt_tokens"]["max"] == max(lengths)
    of = ended.result["conversations"]
    assert of["first_turns"]["cached_share"] == 0.0 and 0 < of["later_turns"]["cached_share"] < 1
    assert len(ended.result["per_instance"]) == instances
    n_local = [instance.get("prompts_computed_here", 0) for instance in ended.result["per_instance"]]
    assert sum(n_local) == (sum(N_TURNS) - len(N_TURNS) if mode == "short turns" else 0)
    page = (ended.log_dir / "report.html").read_text()
    assert "cached prompt tokens" in ended.flowing and "cached prompt tokens" in page


def test_a_conversation_with_tools_at_a_responses_endpoint(one: Starter, tmp_path: Path) -> None:
    """Later requests have the responses as items: texts, and calls of tools with their results."""
    call = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"a": 1}'}}
    rows: list[dict[str, Any]] = [
        {"role": "user", "content": "A", "tools": [{"type": "function", "function": {"name": "ls"}}]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "x"},
    ]
    file = tmp_path / "tools.jsonl"
    lines = [json.dumps({"conversation_id": "x", "turn": i, **row}) for i, row in enumerate(rows, 1)]
    file.write_text("\n".join(lines))
    words = [*CONVERSATIONS[:-1], "--dataset_path", file, "--history", "generated"]
    with ScriptedServer(responses) as server:
        options = ("--url", server.address, "--endpoint_type=responses", "--scenarios=Server")
        ended = one.run(
            2, *words, *options, "--server_target_qps=9", core="trtllm_endpoint", timeout=120
        ).must(DONE)
        bodies = [body for body in server.bodies() if body.get("tools")]
    assert [ended.result["conversations"][name] for name in ("ended", "failed")] == [1, 0]
    question = {"type": "message", "role": "user", "content": "A"}
    later = [
        {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "x"},
    ]
    assert [body["input"] for body in bodies] == [[question], [question, *later]]
    assert ended.result["prompt_tokens"]["max"] > 0  # as the server counts


@pytest.mark.long
def test_a_conversation_with_branches(one: Starter, tmp_path: Path) -> None:
    """The fork has the conversation so far; the second turn waits for both turns of the spawned session."""

    def turn(text: str, **fields: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}], "max_tokens": 5, **fields}

    rows = [
        {
            "session_id": "r",
            "turns": [
                turn("A", spawns=["s"], forks=[{"child": "f", "background": True}]),
                turn("B", delay=5),
            ],
        },
        {"session_id": "s", "turns": [turn("S"), turn("T")]},
        {"session_id": "f", "turns": [turn("F")]},
    ]
    file, table = tmp_path / "tree.jsonl", tmp_path / "requests.csv"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [*CONVERSATIONS[:-1], "--dataset_path", file, "--endpoint_type=responses", "--concurrency", 1]
    words += ["--goodput", "e2el:60000"]
    with ScriptedServer(responses) as server:
        ended = one.run(
            2, *words, "--url", server.address, "--requests_file", table, core="trtllm_endpoint", timeout=120
        ).must(DONE)
        sent = [request for request in server.requests if b'"input"' in request.body]
    sessions = {}
    prompts = []
    for request in sent[-5:]:  # after the warm-up
        prompt = "".join(
            item["content"] if item["role"] == "user" else f"({item['content']})"
            for item in request.json["input"]
        )
        prompts.append(prompt)
        sessions[prompt] = request.headers["x-session-id"]
    response = f"({TEXT})"
    assert prompts[0] == "A"
    assert sorted(prompts) == sorted(["A", "S", f"A{response}F", f"S{response}T", f"A{response}B"])
    assert prompts.index(f"S{response}T") < prompts.index(f"A{response}B")
    assert sessions["A"] == sessions[f"A{response}B"] and len({*sessions.values()}) == 3
    figures = ended.result["conversations"]
    assert [figures[name] for name in ("started", "ended", "failed", "branches")] == [1, 1, 0, 2]
    assert ended.result["requests_expected"] == ended.result["samples"] == 5
    assert ended.result["goodput"]["conversations"] == ended.result["goodput"]["good_conversations"] == 1
    with table.open(newline="") as stream:
        parents = {row["conversation"]: row["parent"] for row in csv.DictReader(stream)}
    assert parents == {"r": "", "s": "r", "f": "r"}
    assert "1 conversation with all branches, 1 at a time" in ended.flowing
    salted = one.run(2, *words, "--url=h:1", "--cache_salt=conversation", core="trtllm_endpoint").must(USAGE)
    assert "--cache_salt conversation: a forked branch continues the prompt of another" in salted.message
