"""Messages as the input of `/v1/responses`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from disagg.errors import ConfigError
from mpillm.data.chat_request import ResponsesRequests, responses_prompt

CALLS = [
    {"id": "c7", "type": "function", "function": {"name": "ls", "arguments": '{"a": 1}'}},
    {"type": "function", "function": {"name": "cat", "arguments": {"b": 2}}},
]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "Où"},
    {"role": "assistant", "content": "", "tool_calls": CALLS, "reasoning_content": "Hm"},
    {"role": "tool", "tool_call_id": "c7", "content": "x"},
    {"role": "tool", "content": "y"},
    {"role": "assistant", "content": "done"},
]


def members(messages: list[dict[str, Any]], tools: Any = None) -> dict[str, Any]:
    made: dict[str, Any] = json.loads("{" + responses_prompt(messages, tools) + "]}")
    return made


def test_messages_become_items() -> None:
    made = members(MESSAGES)
    assert made["instructions"] == "S" and made["input"] == [
        {"type": "message", "role": "user", "content": "Où"},
        {"type": "function_call", "call_id": "c7", "name": "ls", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "call_2", "name": "cat", "arguments": '{"b":2}'},
        {"type": "function_call_output", "call_id": "c7", "output": "x"},
        {"type": "function_call_output", "call_id": "call_2", "output": "y"},
        {"type": "message", "role": "assistant", "content": "done"},
    ]


def test_tools_are_flat() -> None:
    flat = {"type": "function", "name": "ls", "parameters": {}}
    assert members(
        MESSAGES[1:2], [{"type": "function", "function": {"name": "ls", "parameters": {}}}, flat]
    ) == {
        "tools": [flat, flat],
        "input": [{"type": "message", "role": "user", "content": "Où"}],
    }


def test_a_prompt_is_the_beginning_of_the_next_one() -> None:
    first, second = (ResponsesRequests().encode_chats([MESSAGES[:n]], CALLS)[0] for n in (2, 3))
    assert second[: len(first)] == first and second != first
    assert bytes(ResponsesRequests().encode("Où")).decode() == responses_prompt(MESSAGES[1:2])


@pytest.mark.parametrize("call", [5, {}, {"function": {"name": 5}}])
def test_a_call_without_a_name_is_an_error(call: Any) -> None:
    with pytest.raises(ConfigError, match=r"tool_calls has .*must be objects with function"):
        responses_prompt([{"role": "assistant", "content": "", "tool_calls": [call]}])
    with pytest.raises(ConfigError, match="tools has 5; must be objects"):
        responses_prompt([], [5])
