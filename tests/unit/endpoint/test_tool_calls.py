"""Tool calls in the answers of chats."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpillm.comms.messages import RESPONSE, Batch, ResponseFlag
from mpillm.data.dataset import PromptLimits
from mpillm.data.tokenizer import ByteTokenizer
from mpillm.endpoint.protocol import ServedModel
from mpillm.endpoint.tool_calls import ToolCallReader
from tests.helpers.http_api import api, run

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "</b> ü"}}\n</tool_call>'
LIST = '<tool_call>[{"name": "f"}, {"name": "g", "arguments": {}}]</tool_call>'
F = ("f", {"x": "</b> ü"})
BOTH: list[tuple[str, dict[str, Any]]] = [("f", {}), ("g", {})]
CASES: list[tuple[str, str, list[tuple[str, dict[str, Any]]]]] = [
    ("", "", []),
    ("a < b", "a < b", []),
    (CALL, "", [F]),
    (f"I look.\n{CALL}", "I look.\n", [F]),
    (f"{CALL}\n{CALL}\n", "", [F, F]),
    (f"{CALL}{LIST}{CALL}", "", [F, *BOTH, F]),
    (f"{LIST} and\n", "and\n", BOTH),
    (f"a{CALL}b {LIST}", "ab ", [F, *BOTH]),
    # What is no call stays text.
    ("<tool_call", "<tool_call", []),
    ("<tool_call>{}", "<tool_call>{}", []),
    ("<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
    ('<tool_call>{"name": 1}</tool_call> ', '<tool_call>{"name": 1}</tool_call> ', []),
    ('<tool_call>{"name": "f", "arguments": "x"}</tool_call>',) * 2 + ([],),
    (f"<tool_call>{'[' * 100_000}</tool_call>",) * 2 + ([],),
    ("<<tool_call></tool_call>" + CALL, "<<tool_call></tool_call>", [F]),
    (f"<tool_call>{CALL}", f"<tool_call>{CALL}", []),
    ("</tool_call>", "</tool_call>", []),
]


def read(*pieces: str) -> tuple[str, list[tuple[str, Any]]]:
    reader = ToolCallReader()
    parts = [reader.add(piece, is_last=i == len(pieces)) for i, piece in enumerate(pieces, 1)]
    calls = [call for part in parts for call in part[1]]
    assert len({call.id for call in calls}) == len(calls)
    return "".join(part[0] for part in parts), [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(("answer", "text", "calls"), CASES)
def test_calls_are_separated_from_text(answer: str, text: str, calls: list[Any]) -> None:
    assert read(answer) == (text, calls)
    assert read(*answer[:2000], answer[2000:]) == (text, calls)
    for n in range(min(len(answer), 300)):
        assert read(answer[:n], answer[n:]) == (text, calls)


@given(st.lists(st.sampled_from([CALL, LIST, "<tool_call>", "</tool_call>", "<", "a", " ", "{}"])), st.data())
def test_pieces_do_not_change_what_is_read(parts: list[str], data: st.DataObject) -> None:
    answer = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=8)))
    pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    assert read(*pieces) == read(answer)


def test_text_outside_a_call_does_not_wait() -> None:
    reader = ToolCallReader()
    assert reader.add("a <tool", is_last=False) == ("a ", [])
    assert reader.add("box", is_last=False) == ("<toolbox", [])
    assert reader.add("<tool_call>{", is_last=False) == ("", [])


class ToolTokenizer(ByteTokenizer):
    """Tokenizer of a model whose chat template has calls in this format."""

    writes_tool_calls = True


@pytest.mark.parametrize("tools", [[{"type": "function", "function": {"name": "f"}}], []])
@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_with_tools_gets_calls(stream: bool, tools: list[Any]) -> None:
    """Without tools, the answer is a text."""
    answer = f"I look. {CALL}"
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 150, "stream": stream}

    async def test() -> None:
        served = ServedModel(("dummy",), ToolTokenizer(), PromptLimits(vocab_size=256, max_seq_len=1000))
        async with api(served=served) as a:
            for core in a.world.cores:
                core.enqueue = lambda requests: None  # type: ignore[method-assign]
            asking = asyncio.ensure_future(a.post("/v1/chat/completions", body | {"tools": tools}))
            await a.until(lambda: a.world.open.waiting == 1)
            (id_,) = a.world.open._answers
            tokens = [*answer.encode()]
            rows = [(id_, 1, ResponseFlag.FIRST), *[(id_, 1, ResponseFlag.PARTIAL)] * (len(tokens) - 1)]
            for row, token in zip(rows, tokens, strict=True):
                a.world.open.take(Batch(np.array([row], RESPONSE), np.array([token], np.int32)))
                await asyncio.sleep(0)
            last = Batch(
                np.array([(id_, len(tokens), ResponseFlag.FINAL)], RESPONSE), np.array(tokens, np.int32)
            )
            a.world.open.take(last)
            async with await asking as response:
                text = await response.text()
        events = [line[6:] for line in text.split("\n\n") if line.startswith("data: {")] if stream else [text]
        choices = [json.loads(event)["choices"][0] for event in events]
        messages = [choice["delta" if stream else "message"] for choice in choices]
        content = "".join(message["content"] for message in messages)
        calls = [call for message in messages for call in message.get("tool_calls", ())]
        if not tools:
            assert (content, calls, choices[-1]["finish_reason"]) == (answer, [], "stop")
            return
        (call,) = calls
        assert (content, choices[-1]["finish_reason"]) == ("I look. ", "tool_calls")
        assert call.get("index") == (0 if stream else None)
        assert (call["type"], call["function"]["name"]) == ("function", "f")
        assert json.loads(call["function"]["arguments"]) == {"x": "</b> ü"}

    run(test)
