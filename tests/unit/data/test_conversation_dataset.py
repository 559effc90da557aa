"""The data set of conversations: prompts of requests, which share their tokens."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disagg.errors import ConfigError
from mpillm.data.chat_request import ChatRequests
from mpillm.data.conversation_dataset import ConversationChoice, load_conversations
from mpillm.data.dataset import Dataset, PromptLimits, load_dataset
from mpillm.data.generated_history import GeneratedHistory, TokenHistory
from mpillm.data.tokenizer import ByteTokenizer, NoTokenizer

LIMITS = PromptLimits(max_output_len=9)
CHAT = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, "ABCD", strict=True)]


def load(
    folder: Path,
    *rows: Any,
    limits: PromptLimits = LIMITS,
    are_generated: bool | None = None,
    choice: ConversationChoice | None = None,
) -> Dataset:
    file = folder / "f.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load_conversations(file, ByteTokenizer(), limits, are_generated=are_generated, choice=choice)


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
    calling = {**message, "content": None, "tool_calls": [call]}
    assert bytes(long.prompt(0, [calling]).tolist()).decode() == "A\nB"  # without a result of the call


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


def test_an_array_may_be_packed(tmp_path: Path) -> None:
    file = tmp_path / "f.json.gz"
    file.write_bytes(gzip.compress(json.dumps([{"id": "x", "messages": CHAT}]).encode()))
    assert texts(load_conversations(file, ByteTokenizer(), LIMITS)) == ["A", "A\nB\nC"]
    with pytest.raises(ConfigError, match=r"f.json.gz: a JSON array in a packed file; unpack it first"):
        load_dataset(file, ByteTokenizer(), LIMITS)


def test_long_conversations_take_little_more_memory_than_their_last_prompt(tmp_path: Path) -> None:
    turns = [{"text": "x" * 4000}] * 64
    rows = [{"turns": turns, "session_id": str(i)} for i in range(2)]
    file = tmp_path / "f.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    tracemalloc.start()
    dataset = load_conversations(file, ChatRequests(), LIMITS)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(dataset) == 128 and most < 30e6, f"{most} bytes"


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


BURST_GPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,7,3,10,Conversation log
45.5,GPT-4,9,0,9,Conversation log
118,GPT-4,8,2,10,API log
"""
BURST_GPT_COLUMNS = {
    "timestamp": "Timestamp",
    "input_length": "Request tokens",
    "output_length": "Response tokens",
    "timestamp_unit": "s",
}


def test_a_trace_with_other_names_of_columns(tmp_path: Path) -> None:
    """BurstGPT's failed requests have no output tokens."""
    file = tmp_path / "burst.csv"
    file.write_text(BURST_GPT, encoding="utf-8")
    dataset = load_conversations(file, ByteTokenizer(), LIMITS, choice=ConversationChoice(BURST_GPT_COLUMNS))
    assert dataset.turns is not None and dataset.output_lengths is not None
    assert dataset.n_tokens.tolist() == [7, 8] and dataset.output_lengths.tolist() == [3, 2]
    assert dataset.turns.at_s.tolist() == [5, 118]
    assert dataset.note == "rows without output tokens, which are left out: 1"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"Timestamps": 1},
            "f.jsonl:1: no column Timestamp (did you mean 'Timestamps'?); there are Timestamps",
        ),
        ({"Timestamp": "noon"}, 'f.jsonl:1: Timestamp is "noon"; must be a number'),
        ("text", 'f.jsonl:1: "text" has no columns, which --trace_columns names'),
    ],
)
def test_a_row_without_the_named_columns(tmp_path: Path, row: Any, message: str) -> None:
    file = tmp_path / "f.jsonl"
    file.write_text(json.dumps(row), encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        load_conversations(
            file, ByteTokenizer(), LIMITS, choice=ConversationChoice({"timestamp": "Timestamp"})
        )
    assert message in str(error.value)


def test_the_longest_delay_and_gap(tmp_path: Path) -> None:
    rows = [
        *({"session_id": "s", "prompt": "A", "timestamp": at, "delay": 9000} for at in (1000, 2000, 30_000)),
        {"session_id": "s", "prompt": "A"},
        *({"session_id": "t", "prompt": "B", "timestamp": at} for at in (50_000, 50_500, 90_000)),
    ]
    turns = load(tmp_path, *rows).turns
    assert turns is not None
    less = turns.with_gaps(2.0)
    assert less.delay_s.tolist() == [2, 2, 2, 0, 0, 0, 0]
    assert np.nan_to_num(less.at_s, nan=-1).tolist() == [1, 2, 4, -1, 50, 50.5, 52.5]
    assert turns.with_gaps(100.0).delay_s.tolist() == turns.delay_s.tolist()
    assert turns.with_gaps(0.0).at_s[-1] == 50


def test_conversations_in_random_order(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i:02}"} for i in range(20)]
    shuffled = [
        texts(load(tmp_path, *rows, choice=ConversationChoice(order_seed=seed))) for seed in (7, 7, 8)
    ]
    assert shuffled[0] == shuffled[1] != shuffled[2]
    assert sorted(shuffled[0]) == texts(load(tmp_path, *rows)) != shuffled[0]


def test_keys_without_effect_and_cut_responses_are_named(tmp_path: Path) -> None:
    rows = [
        {"session_id": "s", "prompt": "A", "timestamp": 5, "temperature": 1, "output_length": 12},
        {"session_id": "s", "prompt": "B", "delay": 5, "seed": 7, "tools": [], "output_length": 9},
    ]
    assert load(tmp_path, *rows).note == (
        "1 of its 2 samples exceed --max_output_len 9 with at most 12 tokens: their answers are cut;"
        " its seed, temperature have no effect"
    )


def test_long_prompts_of_traces_are_left_out(tmp_path: Path) -> None:
    rows = [{"input_length": 3}, {"input_length": 5}, {"input_length": 3_000_000_000}]
    dataset = load(tmp_path, *rows, choice=ConversationChoice(max_input_len=4))
    assert dataset.n_tokens.tolist() == [3]
    assert dataset.note == "conversations with a prompt of more than 4 tokens, which are left out: 2"


def test_conversations_with_long_prompts_are_left_out(tmp_path: Path) -> None:
    rows = [{"id": "x", "messages": CHAT}, {"prompt": "E"}, {"id": "y", "messages": CHAT[:2]}]
    dataset = load(tmp_path, *rows, choice=ConversationChoice(max_input_len=4))
    assert texts(dataset) == ["E", "A"] and dataset.turns is not None and len(dataset.turns) == 2
    assert dataset.note == "conversations with a prompt of more than 4 tokens, which are left out: 1"
    with pytest.raises(ConfigError, match="each conversation has a prompt of more than 4 tokens"):
        load(tmp_path, rows[0], choice=ConversationChoice(max_input_len=4))


def test_rows_of_token_ids_need_no_chat_template(tmp_path: Path) -> None:
    (file := tmp_path / "f.jsonl").write_text('{"prompt": [5, 6]}\n{"input_tokens": [7]}\n')
    dataset = load_conversations(file, NoTokenizer("DIR has no tokenizer"), PromptLimits(max_output_len=4))
    assert [dataset.sample(i).tolist() for i in range(len(dataset))] == [[5, 6], [7]]
