"""AIPerf's conversations and traces against `serve`, and the same files by our own load."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpillm.report.request_log import read_requests
from tests.helpers.peer_programs import TIMEOUT_S, Program, Show, peer_environment
from tests.helpers.serve_command import serve
from tests.helpers.support import DONE, Starter

pytestmark = pytest.mark.peers

TEXTS: list[dict[str, Any]] = [{"text": "What is rain?"}, {"text": "And snow?", "delay": 150}]
LENGTHS: list[dict[str, Any]] = [
    {"input_length": 600, "hash_ids": [1, 2]},
    {"input_length": 40, "hash_ids": [3], "delay": 200},
]
LENGTH = {"output_length": 8}
MULTI_TURN: list[dict[str, Any]] = [
    {"session_id": name, "turns": [{**turn, **LENGTH} for turn in TEXTS]} for name in "ab"
]
MOONCAKE: list[dict[str, Any]] = [
    {"session_id": name, **row, **LENGTH}
    for name, at in (("a", 0), ("b", 500))
    for row in ({"timestamp": at, **LENGTHS[0]}, LENGTHS[1])
]
FILES: dict[str, tuple[list[dict[str, Any]], tuple[object, ...], tuple[object, ...]]] = {
    # rows, AIPerf's options, ours
    "multi_turn": (MULTI_TURN, ("--concurrency", 1, "--num-conversations", 2), ("--concurrency", 1)),
    "mooncake_trace": (MOONCAKE, ("--fixed-schedule",), ("--scenarios", "Server")),
}


@pytest.fixture(scope="module")
def url(start: Starter, model: Path) -> Iterator[str]:
    """Yield the address of `serve`; it must end well, with every request answered."""
    command, host, port = serve(start, 2, "--model_path", model, "--max_seq_len", 2048)
    yield f"http://{host}:{port}"
    command.process.send_signal(signal.SIGTERM)
    result = command.end(120).must(DONE).result
    assert (result["errors"], result["aborted"]) == (0, 0)


@pytest.mark.parametrize("kind", FILES)
def test_the_same_prompts(
    kind: str, url: str, program: Program, model: Path, one: Starter, show: Show
) -> None:
    """A server counts the same tokens for each turn: the same history, texts of the same lengths."""
    lines, theirs, ours = FILES[kind]
    file, folder = one.folder / "f.jsonl", one.folder / "aiperf"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [program("aiperf"), "profile", "--model", model.name, "--url", url, "--endpoint-type", "chat"]
    words += ["--streaming", "--use-server-token-count", "--tokenizer", model, "--ui", "simple"]
    words += ["--input-file", file, "--custom-dataset-type", kind, *theirs]
    words += ["--extra-inputs", "temperature:0", "--workers-max", 1, "--artifact-dir", folder]
    one.command(words, env=peer_environment()).end(TIMEOUT_S, tidy=False).must(0)
    records = [json.loads(line) for line in (folder / "profile_export.jsonl").read_text().splitlines()]
    assert not [record["error"] for record in records if record.get("error")]
    counts = {
        (record["metadata"]["conversation_id"], record["metadata"]["turn_index"]): (
            record["metrics"]["usage_prompt_tokens"]["value"],
            record["metrics"]["usage_completion_tokens"]["value"],
        )
        for record in records
    }
    options = ("--url", url, "--endpoint_type", "chat", "--model_path", model, "--dataset_path", file)
    command = one.start(2, *options, "--harness", "conversations", *ours, core="openai")
    assert command.end(TIMEOUT_S).must(DONE).result["errors"] == 0
    rows = {int(row["index"]): row for row in read_requests(one.folder / "run")}
    made = {
        (name, turn): (int(rows[2 * number + turn]["prompt"]), int(rows[2 * number + turn]["tokens"]))
        for number, name in enumerate("ab")
        for turn in (0, 1)
    }
    show(f"{kind}: prompt and response tokens {sorted(counts.items())}, ours {sorted(made.items())}")
    if kind == "multi_turn":  # the same texts
        assert made == counts
    else:  # random texts with the same lengths; responses may differ
        for turn, (n_prompt, _) in counts.items():
            assert made[turn][0] == pytest.approx(n_prompt, abs=16)
