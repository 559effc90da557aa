"""Conversations of data sets, in every published form."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from disagg.errors import ConfigError
from mpillm.data.conversation_rows import read_conversations
from mpillm.data.conversations import Conversation
from mpillm.data.records import Columns, Trace

CALL = {"id": "a", "type": "function", "function": {"name": "run", "arguments": '{"cmd": "pytest"}'}}


def read(*rows: Any) -> list[Conversation]:
    return read_conversations(((f"f.jsonl:{n}", row) for n, row in enumerate(rows, 1)), 1000)


def flat(turn: int, role: str, name: str = "t1", **fields: Any) -> dict[str, Any]:
    return {"conversation_id": name, "turn": turn, "role": role, **fields}


def recorded(conversation: Conversation, turn: int) -> list[dict[str, Any]]:
    """Return the messages of a request, with the recorded responses."""
    return conversation.messages(conversation.recorded_responses[:turn])


def prompts(conversation: Conversation) -> list[list[str]]:
    """Return the messages of each request: the first letter of the role, and the content."""
    return [
        [f"{one['role'][0]}:{one['content'] or ''}" for one in recorded(conversation, i)]
        for i in range(len(conversation.turns))
    ]


CHAT = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]
AGENT = (
    flat(1, "user", content="fix", system="be brief", tools=[{"type": "function"}], delay_seconds=0.5),
    flat(2, "assistant", tool_calls=[CALL], reasoning_content="hm"),
    flat(3, "tool", tool_results=[{"tool_call_id": "a", "content": "1 failed"}], delay_seconds=1.25),
    flat(4, "assistant", content="line 3"),
    flat(1, "user", "t2", content="hi", max_new_tokens=7),
)


def test_a_row_per_message_is_mlcommons_form() -> None:
    first, second = read(*AGENT)
    assert prompts(first) == [["s:be brief", "u:fix"], ["s:be brief", "u:fix", "a:", "t:1 failed"]]
    assert [turn.delay_s for turn in first.turns] == [0.5, 1.25]
    assert (
        recorded(first, 1)[2]["tool_calls"] == [CALL] and recorded(first, 1)[2]["reasoning_content"] == "hm"
    )
    assert recorded(first, 1)[3]["tool_call_id"] == "a"
    assert (first.name, first.tools, first.has_responses) == ("t1", [{"type": "function"}], True)
    assert (second.name, second.turns[0].output_len, second.tools) == ("t2", 7, None)


def test_a_system_row_and_a_tool_row_with_content() -> None:
    """The form of early examples: a row of the system's, and a tool's content without tool_results."""
    (one,) = read(
        flat(1, "system", content="agent"),
        flat(2, "user", content="fix"),
        flat(3, "assistant", tool_calls=[CALL]),
        flat(4, "tool", tool_call_id="a", content="ok"),
    )
    assert prompts(one)[1] == ["s:agent", "u:fix", "a:", "t:ok"]


def test_several_results_of_tools_are_messages_of_one_turn() -> None:
    results = [{"tool_call_id": name, "content": name} for name in "ab"]
    calls = [CALL, {**CALL, "id": "b"}]
    rows = AGENT[0], flat(2, "assistant", tool_calls=calls), flat(3, "tool", tool_results=results)
    assert prompts(read(*rows)[0])[1][-2:] == ["t:a", "t:b"]


def messages(*texts: str) -> list[dict[str, str]]:
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": roles[text[0]], "content": text[2:]} for text in texts]


@pytest.mark.parametrize(
    "row",
    [
        {"id": "x", "messages": messages("s:S", "u:A", "a:B", "u:C", "a:D")},
        {
            "id": "x",
            "conversations": [
                {"from": "system", "value": "S"},
                {"from": "human", "value": "A"},
                {"from": "gpt", "value": "B"},
                {"from": "human", "value": "C"},
            ],
        },
    ],
    ids=["vllm", "sharegpt"],
)
def test_a_row_per_conversation(row: dict[str, Any]) -> None:
    (one,) = read(row)
    assert one.name == "x" and prompts(one) == [["s:S", "u:A"], ["s:S", "u:A", "a:B", "u:C"]]
    assert one.has_responses


def test_aiperf_turns_have_delays_and_times_in_milliseconds() -> None:
    turns = [{"text": "A", "timestamp": 1500}, {"text": "B", "delay": 250, "output_length": 3}]
    (one,) = read({"session_id": "s", "turns": turns})
    assert [(turn.delay_s, turn.at_s, turn.output_len) for turn in one.turns] == [
        (0, 1.5, None),
        (0.25, None, 3),
    ]
    assert not one.has_responses, "the responses of the test are its history"


@pytest.mark.parametrize(
    "row", [flat(1, "user", content="A"), {"turns": ["A"]}, {"prompt_0": "A"}, {"messages": CHAT}]
)
def test_named_columns_make_each_row_a_request_or_are_errors(row: dict[str, Any]) -> None:
    def named(columns: Columns) -> list[Conversation]:
        return read_conversations([("f.jsonl:1", {**row, "question": "B", "n": 3})], 1000, columns)

    (one,) = named(Columns("question", "n"))
    assert [(turn.prompt, turn.output_len) for turn in one.turns] == [("B", 3)]
    with pytest.raises(ConfigError, match=r"f.jsonl:1: a row of a conversation; --output_len_column is for"):
        named(Columns(output_len="n"))


def test_guidellm_columns() -> None:
    (one,) = read({"prompt_0": "A", "output_tokens_count_0": "5", "prompt_1": "B", "prompt_2": ""})
    assert prompts(one) == [["u:A"], ["u:A", "u:B"]] and one.turns[0].output_len == 5
    (one,) = read({"prefix": "S", "prompt_0": "A", "prompt_1": "B"})
    assert prompts(one)[1] == ["s:S", "u:A", "u:B"]


def test_texts_of_a_session_in_a_trace_add_to_it() -> None:
    """As in AIPerf. Rows of its other forms have complete prompts."""
    (added,) = read(*({"session_id": "s", "text_input": text} for text in "AB"))
    assert prompts(added) == [["u:A"], ["u:A", "u:B"]] and not added.has_responses
    (complete,) = read(*({"session_id": "s", "text": text} for text in "AB"))
    assert [turn.prompt for turn in complete.turns] == ["A", "B"] and complete.has_responses


def test_a_row_per_request() -> None:
    """Traces, OpenAI's batches, chats so far, and plain prompts. A session joins its requests."""
    rows = read(
        {"timestamp": 0, "input_length": 9, "output_length": 5, "hash_ids": [1]},
        {"timestamp": 2000, "input_length": 8, "output_length": 4, "session_id": "s"},
        {"timestamp": 1000, "input_length": 7, "output_length": 3},
        {"delay": 500, "input_length": 6, "session_id": "s"},
        {"custom_id": "1", "method": "POST", "body": {"messages": messages("u:A"), "max_tokens": 2}},
        {"messages": messages("u:A", "a:B", "u:C")},
        {"text_input": "A", "output_length": 4},
        {"prompt": "A"},
    )
    samples = [[turn.prompt for turn in one.turns] for one in rows]
    traces = [[turn.trace for turn in one.turns] for one in rows]
    assert traces[0] + traces[1] == [Trace(9, (1,)), Trace(8, ()), Trace(6, ())]
    assert [turn.at_s for turn in rows[1].turns] == [2.0, None] and rows[1].turns[1].delay_s == 0.5
    assert [one[0] for one in samples[3:]] == [
        messages("u:A"),
        messages("u:A", "a:B", "u:C"),
        "A",
        "A",
    ]
    assert rows[3].turns[0].output_len == 2 and len(rows) == 7


def test_several_texts_are_parts_of_one_message() -> None:
    """AIPerf's forms of texts, a system turn, and MT-Bench's turns without objects."""
    named = [{"name": "q", "contents": ["A", "B"]}, "C"]
    turns = [{"role": "system", "text": "S"}, {"texts": named}, {"text": "D", "max_tokens": 3}]
    one, two, three = read({"session_id": "s", "turns": turns}, {"texts": ["A", "B"]}, {"turns": ["A", "B"]})
    assert prompts(one)[1] == ["s:S", "u:A\nB\nC", "u:D"] and one.turns[1].output_len == 3
    assert two.turns[0].prompt == "A\nB" and prompts(three)[1] == ["u:A", "u:B"]


def test_openai_batches_have_tools() -> None:
    tools = [{"type": "function"}]
    body = {"messages": messages("s:S", "u:A"), "tools": tools, "max_completion_tokens": 4}
    rows = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": body} for i in (1, 2)
    ]
    one, two = read(*rows)
    assert (one.tools, one.turns[0].output_len, one.turns[0].prompt) == (tools, 4, body["messages"])
    assert two.tools == tools


def test_conversations_of_sharegpt_without_a_user_are_left_out() -> None:
    rows = [
        {"id": 1, "conversations": []},
        {"id": 2, "conversations": [{"from": "gpt", "value": "A"}]},
        {"id": 3, "conversations": [{"from": "human", "value": "A"}]},
    ]
    left_out: list[str] = []
    (one,) = read_conversations(((str(n), row) for n, row in enumerate(rows)), 1000, left_out=left_out)
    assert one.name == "3" and left_out == ["0", "1"]


def test_delta_messages_continue_a_session() -> None:
    rows = [{"session_id": "s", "message_mode": "delta", "messages": messages(f"u:{text}")} for text in "AB"]
    (one,) = read(*rows)
    assert prompts(one) == [["u:A"], ["u:A", "u:B"]] and not one.has_responses


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([flat(2, "user", content="A")], "f.jsonl:1: turn is 2; expected 1: turns count from 1 without gaps"),
        ([*AGENT[:2], flat(4, "tool")], "f.jsonl:3: turn is 4; expected 3: turns count from 1 without gaps"),
        ([AGENT[0], AGENT[4], AGENT[1]], "f.jsonl:3: conversation_id t1 is also an earlier"),
        (
            [flat(1, "assistant", content="A")],
            "f.jsonl:1: role assistant follows nothing; there is no request",
        ),
        ([AGENT[0], flat(2, "user", content="A")], "f.jsonl:2: role user follows user: the response between"),
        (
            [*AGENT[:2], flat(3, "user", content="A")],
            "f.jsonl:3: role user follows tool_calls without a tool",
        ),
        ([AGENT[0], flat(2, "tool", content="A")], "f.jsonl:2: role tool follows user without tool_calls"),
        ([flat(1, "system", content="A"), AGENT[4]], "f.jsonl:1: the conversation has no request of a user"),
        ([flat(1, "robot", content="A")], 'f.jsonl:1: role is "robot"; must be system, user, assistant or'),
        ([flat(1, "user")], "f.jsonl:1: content is null; must be text"),
        (
            [flat(1, "user", content="A", delay_seconds=-1)],
            "f.jsonl:1: delay_seconds is -1; must be a number",
        ),
        (
            [flat(1, "user", content="A", delay_seconds="soon")],
            'f.jsonl:1: delay_seconds is "soon"; must be a number from 0 to 1e+06',
        ),
        ([flat(1, "user", "b\n", content="A")], 'f.jsonl:1: conversation_id is "b\\n"; must be printable'),
        ([*AGENT[:2], flat(3, "tool", tool_results=[{}])], "f.jsonl:3: tool_results[0] has no tool_call_id"),
        ([{"turns": []}], "f.jsonl:1: turns is empty"),
        ([{"turns": [{"text": 1}]}], "f.jsonl:1: turns[0] has text 1; must be a text, or texts"),
        ([{"turns": [{"texts": []}]}], "f.jsonl:1: turns[0] has text []; must be a text, or texts"),
        ([{"turns": [3]}], "f.jsonl:1: turns has 3; must be objects or texts"),
        (
            [{"custom_id": "a", "url": "/v1/embeddings", "body": {"input": "A"}}],
            'f.jsonl:1: url is "/v1/embeddings"; must be that of a chat or a completion',
        ),
        ([{"custom_id": "a", "url": "/v1/completions"}], "f.jsonl:1: body is null; must be an object"),
        (
            [{"custom_id": "a", "body": {"prompt": ["A", "B"]}}],
            "f.jsonl:1: prompt has 2 prompts; must be one, in a row of its own",
        ),
        (
            [{"turns": [{"text": "A", "timestamp": 9}, {"text": "B", "timestamp": 8}]}],
            "f.jsonl:1: timestamp 8 is before the previous turn's, 9",
        ),
        (
            [{"input_length": 1, "session_id": 1, "timestamp": t} for t in (9, 8)],
            "f.jsonl:2: timestamp 8 is before the previous turn's, 9",
        ),
        (
            [{"turns": [{"text": "A", "timestamp": t} for t in (9, 8, 10)]}],
            "f.jsonl:1: timestamp 8 is before the previous turn's, 9",
        ),
        (
            [{"input_length": 1, "session_id": 1, "timestamp": t} for t in (9, None, 8)],
            "f.jsonl:3: timestamp 8 is before the previous turn's, 9",
        ),
        (
            [{"input_length": 1, "timestamp": t} for t in (100, None, 100, 50)],
            "f.jsonl:4: timestamp 50 is before an earlier row's, 100; sort the rows by time",
        ),
        (
            [*AGENT[:2], flat(3, "tool", tool_results=[{"tool_call_id": "b", "content": "x"}])],
            'f.jsonl:3: tool_call_id is "b"; the calls before it are ["a"]',
        ),
        (
            [AGENT[0], flat(2, "assistant", tool_calls="run")],
            'f.jsonl:2: tool_calls is "run"; must be an array of calls',
        ),
        (
            [{"turns": [{"text": "A"}, {"text": "B", "delay": -1}]}],
            "f.jsonl:1: delay is -1; must be a number from 0 to 1e+09",
        ),
        ([{"prompt": "A", "delay": float("nan")}], "f.jsonl:1: delay is NaN; must be a number"),
        ([{"prompt": "A", "timestamp": float("inf")}], "f.jsonl:1: timestamp is Infinity; must be a number"),
        ([{"prompt": "A", "delay": 10**400}], "f.jsonl:1: delay is 1000000"),
        ([{"prompt": "A", "delay": True}], "f.jsonl:1: delay is true; must be a number"),
        ([{"prompt_0": "A", "prompt_2": "B"}], "f.jsonl:1: prompt_2 follows a missing prompt_1"),
        (
            [{"conversations": [{"from": "alien", "value": "A"}]}],
            'f.jsonl:1: from is "alien"; must be one of',
        ),
        (
            [{"id": 1, "messages": messages("u:A", "a:B", "a:C")}],
            'f.jsonl:1: two assistant messages in a row: "C"',
        ),
        ([{"id": 1, "messages": messages("u:A", "a:B")}] * 2, "f.jsonl:2: 1 is also the name of an earlier"),
        (
            [{"session_id": "s", "input_length": 4}, {"session_id": "s", "text_input": "A"}],
            "f.jsonl:2: session s has rows with input_length and with messages or a text to add; its rows",
        ),
        (
            [
                {"session_id": "s", "messages": messages("u:A")},
                {"session_id": "s", "message_mode": "delta", "messages": messages("u:B")},
            ],
            "f.jsonl:2: session s has rows with a complete prompt and with messages or a text to add; its",
        ),
        (
            [
                {"session_id": "s", "message_mode": "delta", "messages": messages("u:A")},
                {"session_id": "s", "message_mode": "delta", "messages": messages("u:B"), "tools": [CALL]},
            ],
            "f.jsonl:2: tools are not those of the first row of session s; must be equal, or missing",
        ),
        (
            [{"session_id": "\ud800", "messages": messages("u:A")}],
            "f.jsonl:1: session_id has half a surrogate pair at character 1",
        ),
        (
            [{"session_id": "s", "message_mode": "delta", "prompt": "A"}],
            "f.jsonl:1: message_mode is delta, but",
        ),
        ([{"turns": ["A\ud800"]}], "f.jsonl:1: turns[0] has half a surrogate pair at character 2"),
        (
            [{"messages": messages("u:\ud800")}],
            "f.jsonl:1: messages has half a surrogate pair at character 1",
        ),
        ([{"prompt_0": "\ud800"}], "f.jsonl:1: prompt_0 has half a surrogate pair at character 1"),
        (
            [{"conversations": [{"from": "human", "value": "\ud800"}]}],
            "f.jsonl:1: conversations has half a surrogate pair at character 1",
        ),
        ([flat(1, "user", content="\ud800")], "f.jsonl:1: content has half a surrogate pair at character 1"),
        ([{"timestamp": float("nan"), "input_length": 1}], "f.jsonl:1: timestamp is NaN; must be a number"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(rows: list[Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(*rows)
    assert str(error.value).startswith(message)


@pytest.mark.long
def test_a_session_that_never_ends_is_an_error() -> None:
    """Each row takes the same time, however long its session is."""
    rows = ({"session_id": "s", "input_length": 1, "timestamp": t} for t in itertools.count())
    with pytest.raises(ConfigError) as error:
        read_conversations(((f"f.jsonl:{n}", row) for n, row in enumerate(rows, 1)), 1000)
    assert str(error.value) == "f.jsonl:100001: conversation s has more than 100,000 requests"


def test_csv_has_only_text() -> None:
    """Numbers are texts there, and a missing field is an empty one."""
    empty = dict.fromkeys(("tool_calls", "tools", "delay_seconds", "system"), "")
    (one,) = read(
        {**empty, **flat(1, "user", content="A"), "turn": "1"},
        {**empty, **flat(2, "assistant", content="B"), "turn": "2"},
        {**empty, **flat(3, "user", content="C", delay_seconds="0.5"), "turn": "3"},
    )
    assert prompts(one)[1] == ["u:A", "a:B", "u:C"] and one.turns[1].delay_s == 0.5
    (trace,) = read({"input_length": "9", "timestamp": "1500", "session_id": "", "delay": ""})
    assert (trace.turns[0].at_s, trace.turns[0].trace) == (1.5, Trace(9, ()))


def test_each_complete_prompt_has_the_latest_tools() -> None:
    """As in AIPerf's traces with messages."""
    first, second = [{"name": "a"}], [{"name": "b"}]
    rows = [{"session_id": "s", "messages": messages("u:A")} for _ in range(4)]
    rows[1]["tools"], rows[3]["tools"] = first, second
    (one,) = read(*rows)
    assert [turn.tools for turn in one.turns] == [None, first, first, second]


def test_messages_with_responses_have_their_own_length_and_arrival() -> None:
    row = {"messages": messages("u:A", "a:B", "u:C", "a:D"), "max_tokens": 4, "timestamp": 2500, "model": "m"}
    (one,) = read(row)
    assert [(turn.output_len, turn.at_s) for turn in one.turns] == [(4, 2.5), (4, None)]
    assert one.turns[0].unused == {"model"}
    (dated,) = read({**row, "timestamp": "2023-04-09T00:02:53"})
    assert dated.turns[0].at_s is None and dated.turns[0].unused == {"model", "timestamp"}


def test_turns_have_tools_and_their_other_keys_are_named() -> None:
    (one,) = read({"session_id": "s", "tools": [{"name": "a"}], "turns": [{"text": "A", "model": "m"}]})
    assert one.tools == [{"name": "a"}] and one.turns[0].unused == {"model"}


def test_time_stamps_may_count_from_1970() -> None:
    rows = [{"timestamp": 1_700_000_000_000 + t, "input_length": 4} for t in (0, 500)]
    assert [one.turns[0].at_s for one in read(*rows)] == [1_700_000_000.0, 1_700_000_000.5]
