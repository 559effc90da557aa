"""Weka's traces of agents as conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disagg.errors import ConfigError
from mpillm.data.chat_request import ChatRequests
from mpillm.data.conversation_dataset import ConversationChoice, load_conversations
from mpillm.data.dataset import Dataset, PromptLimits, load_dataset
from mpillm.data.tokenizer import ByteTokenizer


def call(t: float, n_in: int, *hashes: int, n_out: int = 5, **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "s", "model": "m", "in": n_in, "out": n_out, "hash_ids": [*hashes], **more}


def trace(name: str, *requests: Any, **more: Any) -> dict[str, Any]:
    local = {"block_size": 4, "hash_id_scope": "local", "models": ["m"], "totals": {}}
    return {"id": name, **local, "requests": [*requests], **more}


AGENT = {"type": "subagent", "agent_id": "agent_001", "subagent_type": "Explore", "status": "completed"}


def load(tmp_path: Path, *rows: Any, chat: bool = False, longest: int | None = None) -> Dataset:
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = ByteTokenizer()
    limits = PromptLimits(max_output_len=9)
    choice = ConversationChoice(max_input_len=longest)
    if chat:
        return load_conversations(file, ChatRequests(), limits, choice=choice, writer=tokenizer)
    return load_conversations(file, tokenizer, limits, choice=choice)


def prompts(dataset: Dataset) -> list[list[int]]:
    return [dataset.sample(i).tolist() for i in range(len(dataset))]


@pytest.mark.parametrize("scope", ["local", "global", None])
def test_prompts_are_complete_and_equal_hashes_are_equal_tokens(tmp_path: Path, scope: str | None) -> None:
    rows = [trace("x", call(0, 6, 1, 2), call(1, 11, 1, 2, 3)), trace("y", call(0, 6, 1, 2))]
    dataset = load(tmp_path, *({**row, "hash_id_scope": scope} for row in rows))
    first, second, other = prompts(dataset)
    assert (len(first), len(second)) == (6, 11) and second[:6] == first
    assert (other == first) == (scope != "local"), "hashes of the scope local are the trace's own"
    assert dataset.turns is not None and not dataset.turns.are_generated
    assert [one.name for one in dataset.turns.conversations] == ["x", "y"]
    assert dataset.output_lengths is not None and dataset.output_lengths.tolist() == [5] * 3


def test_a_request_follows_when_the_client_was_ready(tmp_path: Path) -> None:
    """Not after the recorded duration of the response too; and a recorded overlap has no delay."""
    calls = [
        call(10, 4, 1, api_time=3.0),
        call(15, 5, 1, think_time=9),
        call(15.5, 5, 1, api_time=9),
        call(17, 6, 1),
    ]
    dataset = load(tmp_path, trace("x", *calls))
    assert dataset.turns is not None and dataset.turns.delay_s.tolist() == [0, 2, 0.5, 0]
    assert np.isnan(dataset.turns.at_s).all()


@pytest.mark.parametrize("relative", [True, False])
def test_sub_agents_are_branches(tmp_path: Path, relative: bool) -> None:
    """The agent's next call, which began after both had ended, waits for them."""
    start = 0 if relative else 10
    first = {**AGENT, "t": 10, "requests": [call(start + 1, 11, 7), call(start + 5, 12, 7)]}
    second = {**AGENT, "t": 10, "agent_id": "b", "requests": [call(start + 2, 21, 8)]}
    dataset = load(tmp_path, trace("x", call(0, 31, 1), first, second, call(20, 32, 1)))
    turns = dataset.turns
    assert turns is not None and len(turns) == 1
    assert [one.name for one in turns.conversations] == ["x", "x/1", "x/2"]
    assert [(one.after, one.join) for one in turns.conversations[0].branches] == [(0, 1), (0, 1)]
    assert dataset.n_tokens.tolist() == [31, 32, 11, 12, 21]
    assert turns.delay_s.tolist() == [0, 5, 11, 4, 12], "5 s after the end of the first sub-agent"


def sub_agent(t: float, ended: float) -> dict[str, Any]:
    return {**AGENT, "t": t, "requests": [call(t, 9, api_time=ended - t)]}


def test_sub_agents_run_beside_the_calls_that_began_before_their_end(tmp_path: Path) -> None:
    agents = [sub_agent(1, 5), sub_agent(11, 22), sub_agent(12, 20), sub_agent(13, 99)]
    own = [call(t, 30 + t, api_time=5) for t in (0, 10, 20, 30)]
    dataset = load(tmp_path, trace("x", *agents, *own))
    assert dataset.turns is not None
    branches = dataset.turns.conversations[0].branches
    # The first one began before any response, and those at 11 to 13 s while the second call ran.
    assert [(one.after, one.join) for one in branches] == [(0, 1), (0, 3), (0, 2), (0, None)]
    assert dataset.turns.delay_s.tolist() == [0, 5, 0, 5, 0, 6, 7, 8]
    assert load(tmp_path, trace("y", sub_agent(1, 5), sub_agent(6, 7))).n_tokens.tolist() == [9, 9]


def test_a_long_prompt_of_a_sub_agent_leaves_its_trace_out(tmp_path: Path) -> None:
    long = {**AGENT, "t": 1, "requests": [call(1, 500, 1)]}
    dataset = load(tmp_path, trace("x", call(0, 4, 1), long), trace("y", call(0, 5, 1)), longest=100)
    assert dataset.n_tokens.tolist() == [5] and "more than 100 tokens, which are left out: 1" in dataset.note


def test_texts_for_a_chat_server(tmp_path: Path) -> None:
    dataset = load(tmp_path, trace("x", call(0, 8, 1, 2), call(1, 12, 1, 2, 3)), chat=True)
    contents = [json.loads("{" + bytes(one).decode() + "]}")["messages"] for one in prompts(dataset)]
    assert [[message["role"] for message in one] for one in contents] == [["user"], ["user"]]
    assert contents[1][0]["content"].startswith(contents[0][0]["content"])


def test_calls_without_output_and_long_prompts_are_left_out(tmp_path: Path) -> None:
    rows = [trace("x", call(0, 4, 1), call(1, 5, n_out=0)), trace("y", call(0, 4, 1), call(2, 500, 1))]
    dataset = load(tmp_path, *rows, longest=100)
    assert dataset.n_tokens.tolist() == [4]
    assert "without output tokens, which are left out: 1" in dataset.note
    assert "conversations with a prompt of more than 100 tokens, which are left out: 1" in dataset.note


@pytest.mark.parametrize(
    ("row", "error"),
    [
        (trace("x", 5), r"requests\[0\] is 5; must be an object"),
        (
            trace("x", call(0, 4), {**call(1, 4), "in": None}),
            r"requests\[1\]: in is null; must be a number of tok",
        ),
        (trace("x", {**call(0, 4), "out": -1}), r"requests\[0\]: out is -1; must be a number of tokens"),
        (
            trace("x", {**call(0, 4), "hash_ids": ["a"]}),
            r"requests\[0\]: hash_ids is .*; must be an array of int",
        ),
        (trace("x", call(-1, 4)), r"requests\[0\]: t is -1; must be a number from 0"),
        (trace("x", call(0, 4, api_time="long")), r"requests\[0\]: api_time is .long.; must be a number"),
        (trace("x", {**call(0, 4), "type": "q"}), r"requests\[0\]: type is .q.; must be n, s or subagent"),
        (trace("x", {**AGENT, "t": 0}), r"requests\[0\]: requests is null; must be an array of calls"),
        (
            trace("x", {**AGENT, "t": 0, "requests": [{**AGENT, "t": 0, "requests": []}]}),
            r"requests\[0\]: requests\[0\]: type is .subagent.; must be n or s",
        ),
        (trace("x", call(0, 4), block_size=0), "block_size is 0; must be a number of tokens"),
        (trace("x", call(0, 4), hash_id_scope="any"), "hash_id_scope is .any.; must be local or global"),
        (trace("x"), "requests has no call with output tokens"),
    ],
)
def test_a_wrong_trace_is_an_error(tmp_path: Path, row: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=f"t.jsonl:2: {error}"):
        load(tmp_path, trace("a", call(0, 4)), row)


def test_a_trace_too_long_for_the_model_names_its_call(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(json.dumps(trace("x", call(0, 4), call(1, 400))))
    limits = PromptLimits(max_output_len=9, max_seq_len=100)
    with pytest.raises(
        ConfigError, match=r"t.jsonl:1: requests\[1\]: the prompt has 400 tokens and does not fit"
    ):
        load_conversations(file, ByteTokenizer(), limits)
    with pytest.raises(ConfigError, match="a conversation, not a prompt; use `run --harness conversations`"):
        load_dataset(file, ByteTokenizer())
