"""The data set of conversations: prompts of requests, which share their tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disagg.errors import ConfigError
from mpillm.data.chat_request import ChatRequests
from mpillm.data.conversation_dataset import load_conversations
from mpillm.data.dataset import Dataset, PromptLimits
from mpillm.data.generated_history import GeneratedHistory, TokenHistory
from mpillm.data.tokenizer import ByteTokenizer

LIMITS = PromptLimits(max_output_len=9)
CHAT = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, "ABCD", strict=True)]


def load(
    folder: Path, *rows: Any, limits: PromptLimits = LIMITS, are_generated: bool | None = None
) -> Dataset:
    file = folder / "f.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load_conversations(file, ByteTokenizer(), limits, are_generated=are_generated)


def texts(dataset: Dataset) -> list[str]:
    return [bytes(dataset.sample(i).astype(np.uint8)).decode() for i in range(len(dataset))]


def test_prompts_have_the_recorded_responses_and_share_tokens(tmp_path: Path) -> None:
    dataset = load(
        tmp_path, {"id": "x", "messages": CHAT}, {"prompt": "E"}, {"id": "y", "messages": CHAT[:2]}
    )
    assert texts(dataset) == ["A", "A\nB\nC", "E", "A"]
    assert len(dataset.tokens) == len("A\nB\nC" + "E" + "A")
    assert dataset.turns is not None
    assert [one.name for one in dataset.turns.conversations] == ["x", "#1", "y"]
    assert dataset.turns.first.tolist() == [0, 2, 3, 4] and not dataset.turns.are_generated


def test_a_prompt_that_does_not_continue_the_one_before_is_stored_whole(tmp_path: Path) -> None:
    rows = [{"session_id": "s", "prompt": text} for text in ("abc", "xy", "xyz")]
    dataset = load(tmp_path, *rows)
    assert texts(dataset) == ["abc", "xy", "xyz"] and len(dataset.tokens) == 6


def test_times_and_lengths(tmp_path: Path) -> None:
    rows = [
        {"session_id": "s", "prompt": "A", "timestamp": 1500},
        {"session_id": "s", "prompt": "B", "delay": 250},
    ]
    dataset = load(tmp_path, *rows, {"prompt": "C", "output_tokens": 3})
    assert dataset.turns is not None and dataset.output_lengths is not None
    assert np.nan_to_num(dataset.turns.at_s, nan=-1).tolist() == [1.5, -1, -1]
    assert (dataset.turns.delay_s.tolist(), dataset.output_lengths.tolist()) == ([0, 0.25, 0], [9, 9, 3])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "f.jsonl is empty"),
        ([{"turns": [{"text": "A"}, {"text": "B"}]}], r"f.jsonl:1: turns\[0\]: the file has no response to"),
        (
            [{"prompt": "A"}, {"id": 1, "messages": CHAT}],
            "f.jsonl:2: the prompt has 5 tokens and does not fit",
        ),
        ([{"input_length": 1 << 40}], "its prompts have 1099511627776 tokens"),
    ],
)
def test_a_request_that_cannot_be_sent_is_named(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, *rows, are_generated=False, limits=PromptLimits(max_output_len=1, max_seq_len=5))


TURNS = {"session_id": "s", "turns": [{"text": "A"}, {"text": "B"}, {"text": "C"}]}


def test_without_all_responses_they_are_generated(tmp_path: Path) -> None:
    """Then the file's data set has only first prompts."""
    for rows, are_generated in (([TURNS], None), ([{"messages": CHAT}], True)):
        dataset = load(tmp_path, *rows, are_generated=are_generated)
        assert dataset.turns is not None and dataset.turns.are_generated
        assert texts(dataset) == ["A"] * len(dataset)
    known = load(tmp_path, {"messages": CHAT}).turns
    assert known is not None and not known.are_generated


def test_prompts_with_generated_responses(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    rows = [
        {"conversation_id": "t", "turn": 1, "role": "user", "content": "D"},
        {"conversation_id": "t", "turn": 2, "role": "assistant", "content": "", "tool_calls": [call]},
        {"conversation_id": "t", "turn": 3, "role": "tool", "tool_call_id": "c", "content": "E"},
        {"prompt": "X"},
    ]
    turns = load(tmp_path, TURNS, *rows, are_generated=True).turns
    assert turns is not None
    history = GeneratedHistory(
        turns.conversations, ByteTokenizer(), PromptLimits(max_seq_len=12, max_output_len=2)
    )
    message = history.message(np.array([*b"yes"], np.int32))
    assert message == {"role": "assistant", "content": "yes"}

    def prompt(number: int, *responses: dict[str, Any]) -> str:
        return bytes(history.prompt(number, responses).tolist()).decode()

    assert prompt(0) == "A"
    assert prompt(0, message) == "A\nyes\nB"
    with pytest.raises(
        ConfigError, match=r"f.jsonl:1: turns\[2\]: the prompt has 13 tokens and does not fit"
    ):
        prompt(0, message, message)
    long = GeneratedHistory(turns.conversations, ByteTokenizer(), LIMITS)
    with_call = bytes(long.prompt(1, [message]).tolist()).decode()
    assert with_call == f"D\n{json.dumps(call)}\nE"  # the recorded call, which the result answers


def test_a_session_of_a_trace_grows_by_its_rows(tmp_path: Path) -> None:
    """As in AIPerf: `input_length` is what the request adds. Rows without hashes have tokens of their own."""
    rows = [{"session_id": name, "input_length": n} for name in "st" for n in (9, 4)]
    made = load(tmp_path, *rows)
    assert made.turns is not None and made.turns.are_generated
    first, _, other, _ = (made.sample(i).tolist() for i in range(4))
    assert len(first) == len(other) == 9 and first != other
    history = TokenHistory(made.turns.conversations, LIMITS)
    second = history.prompt(0, [np.array([1, 2], np.int32)]).tolist()
    assert second[:11] == [*first, 1, 2] and len(second) == 15
    with pytest.raises(ConfigError, match=r"f.jsonl:1: the file has no response to this request"):
        load(tmp_path, *rows, are_generated=False)


def test_a_file_has_sessions_of_lengths_or_of_texts(tmp_path: Path) -> None:
    rows = [{"session_id": "s", "input_length": 4}] * 2
    with pytest.raises(
        ConfigError, match=r"f.jsonl:3: turns\[0\]: a conversation of texts, but others have only"
    ):
        load(tmp_path, *rows, {"turns": ["A", "B"]})
    assert len(load(tmp_path, *rows, {"prompt": "A"})) == 3  # no response is needed in its prompt


def test_prompts_of_a_trace_are_texts_for_a_chat_endpoint(tmp_path: Path) -> None:
    """Equal where the hashes are, which the server can find in its cache."""
    rows = [{"input_length": 700, "hash_ids": ids} for ids in ([1, 2], [1, 3])]
    file = tmp_path / "f.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    made = load_conversations(file, ChatRequests(), LIMITS, writer=ByteTokenizer())
    chats = [json.loads("{" + bytes(made.sample(i).tolist()).decode() + "]}") for i in range(2)]
    (one,), (two,) = (chat["messages"] for chat in chats)
    assert one["role"] == "user" and one["content"][:200] == two["content"][:200] != ""
    assert one != two


def read_text(folder: Path, text: str) -> Dataset:
    file = folder / "f.json"
    file.write_text(text, encoding="utf-8-sig")
    return load_conversations(file, ByteTokenizer(), LIMITS)


@pytest.mark.parametrize("indent", [None, 2])
def test_a_file_may_be_an_array(tmp_path: Path, indent: int | None) -> None:
    """As those of ShareGPT and of vLLM's multi-turn benchmark are."""
    shared = [{"from": "human", "value": "A"}, {"from": "gpt", "value": "B"}, {"from": "human", "value": "C"}]
    rows = [{"id": "x", "messages": CHAT}, {"conversations": []}, {"id": "y", "conversations": shared}]
    dataset = read_text(tmp_path, json.dumps(rows, indent=indent))
    assert texts(dataset) == ["A", "A\nB\nC"] * 2
    assert dataset.note == "conversations without a user's message, which are left out: 1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "f.json is empty"),
        ('[{"prompt": "A"},\n\n  {"prompt": 5}]', "f.json:3: prompt is a JSON number, not a string"),
        ('[{"prompt": "A"},\n {"prompt": }]', "f.json:2: not valid JSON: Expecting value, column 13"),
        ('[{"prompt": "A"},\n {"prompt": "B"}', "f.json:2: not valid JSON: truncated, column 17"),
        ('[{"prompt": "A"}] x', "f.json:1: not valid JSON: Expecting ',' or ']'"),
        ('[{"prompt": "A"},]', "f.json:1: not valid JSON: Expecting value, column 18"),
        ("[" * 100_000, "f.json: nested too deep: line 1"),
    ],
)
def test_what_is_wrong_in_an_array_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_text(tmp_path, text)
    assert message in str(error.value)


def test_tools_of_a_request_are_in_its_prompt(tmp_path: Path) -> None:
    tools = [{"type": "function"}]
    dataset = load(tmp_path, {"body": {"messages": CHAT[:1], "tools": tools}})
    assert texts(dataset) == [f"{json.dumps(tools[0])}\nA"]
