"""Requests to chat endpoints: prompts are messages, and answers may have reasoning and tool calls."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from mpillm.comms.messages import RequestFlag, ResponseFlag
from mpillm.data.chat_request import ChatRequests, chat_prompt
from mpillm.data.row_fields import with_fields
from mpillm.errors import RunError
from tests.helpers.endpoint_cores import FINAL, SERVER, Rows, failure, requests, started
from tests.helpers.scripted_server import (
    DONE,
    STREAM,
    Reply,
    Request,
    ScriptedServer,
    chunk,
    event,
    plain,
)
from tests.helpers.support import wait_until

TOOL = {"type": "function", "function": {"name": "ls", "parameters": {}}}
CHATS = [
    ([{"role": "user", "content": "Hello"}], None),
    ([{"role": "system", "content": "Où"}, {"role": "user", "content": '"]}'}], [TOOL]),
]
PROMPTS = [list(chat_prompt(messages, tools).encode()) for messages, tools in CHATS]
CALLS = [
    {"index": 0, "id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"a"'}},
    {"index": 0, "function": {"arguments": ": 1}"}},
]
MESSAGE = {
    "role": "assistant",
    "content": "Hi there",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"a": 1}'}}],
}
DELTAS: list[dict[str, Any]] = [
    {"role": "assistant", "content": ""},
    {"reasoning_content": "Hm", "reasoning": "Hm"},
    {"content": "Hi "},
    {"content": "there"},
    *({"tool_calls": [call]} for call in CALLS),
    {},
]


def server_of(*, ids: bool = False, unknown: tuple[str, ...] = ()) -> Callable[[Request], Reply]:
    def answer(request: Request) -> Reply:
        body = request.json
        assert request.path == "/v1/chat/completions" and "prompt" not in body
        if any(name in body for name in unknown):
            return plain({"error": {"message": "unknown field"}}, "400 Bad Request")
        n = body["max_completion_tokens"]
        tokens = {"token_ids": [*range(7, 7 + n)]} if ids and body.get("return_token_ids") else {}
        details = {"cached_tokens": 2} if ids else None
        usage = {"prompt_tokens": 3, "completion_tokens": n, "prompt_tokens_details": details}
        if not body.get("stream"):
            message = {**MESSAGE, "reasoning_content": "Hm"}
            choice = {"index": 0, "message": message, "finish_reason": "stop", **tokens}
            return plain({"choices": [choice], "usage": usage})
        choices: list[dict[str, Any]] = [{"index": 0, "delta": delta} for delta in DELTAS]
        choices[2].update(tokens)
        choices[-1]["finish_reason"] = "tool_calls"
        pieces = [event({"choices": [one]}) for one in choices]
        if (body.get("stream_options") or {}).get("include_usage"):
            pieces.append(event({"choices": [], "usage": usage}))
        return Reply([STREAM, chunk(b": alive\n\n"), *map(chunk, pieces), DONE])

    return answer


@pytest.mark.parametrize("options", [(), (SERVER,)], ids=["whole", "streams"])
@pytest.mark.parametrize("ids", [True, False])
def test_messages_go_to_the_chat_endpoint(options: tuple[str, ...], ids: bool) -> None:
    with (
        ScriptedServer(server_of(ids=ids)) as server,
        started(server, *options, "--endpoint_type=chat", sends_text=True) as core,
    ):
        wanted = RequestFlag.MESSAGE | RequestFlag.PROMPT_COUNTS
        core.enqueue(requests(PROMPTS, max_output=9, flags=int(wanted)))
        rows = Rows(core).until(2)
        statistics: dict[str, Any] = core.statistics()
        metrics = core.metrics()
    sent = {json.dumps([one["messages"], one.get("tools")]) for one in server.bodies()}
    probe = json.dumps([[{"role": "user", "content": "Hello"}], None])
    assert sent == {probe, *(json.dumps([*chat]) for chat in CHATS)}
    assert [tokens for _, flags, tokens in rows if flags & FINAL] == [[*range(7, 16)] if ids else [0] * 9] * 2
    messages = [bytes(tokens) for _, flags, tokens in rows if flags & ResponseFlag.MESSAGE]
    assert [json.loads(text) for text in messages] == [MESSAGE] * 2
    counts = [tokens for _, flags, tokens in rows if flags & ResponseFlag.PROMPT_COUNTS]
    assert counts == [[3, 2 if ids else -1]] * 2
    assert statistics["other_answer_length"] == 0
    if options:  # the reasoning comes first
        assert statistics["socket_first_answer_p50_ms"] >= statistics["socket_ttft_p50_ms"] > 0
    assert metrics is not None and metrics.prompt_tokens == 6  # as the server counts


def test_the_rank_gets_all_rows_of_a_response_together() -> None:
    """A row that comes after the others would wait until the next ones may be handed on."""
    with (
        ScriptedServer(server_of(ids=True)) as server,
        started(server, "--endpoint_type=chat", sends_text=True) as core,
    ):
        taken: list[list[int]] = []

        def take() -> None:
            if (batch := core.poll_responses()) is not None:
                taken.append(batch.rows["flags"].tolist())

        core.wake = take
        wanted = RequestFlag.MESSAGE | RequestFlag.PROMPT_COUNTS
        core.enqueue(requests(PROMPTS[:1], max_output=9, flags=int(wanted)))
        wait_until(lambda: any(flags[-1] & FINAL for flags in taken), "the response")
    assert taken == [[ResponseFlag.PROMPT_COUNTS, ResponseFlag.MESSAGE, ResponseFlag.FIRST | FINAL]]


def test_a_chat_server_with_openais_fields_only() -> None:
    only = server_of(unknown=("return_token_ids",))
    with (
        ScriptedServer(only) as server,
        started(server, SERVER, "--endpoint_type=chat", sends_text=True) as core,
    ):
        core.enqueue(requests(PROMPTS, max_output=5))
        rows = Rows(core).until(2)
    assert [len(tokens) for _, flags, tokens in rows if flags & FINAL] == [5, 5]
    assert not any(flags & ResponseFlag.MESSAGE for _, flags, _ in rows)


@pytest.mark.parametrize(
    ("choice", "error"),
    [
        ({"delta": {"content": 5}}, "it sent JSON that is not a completion"),
        ({"delta": {"tool_calls": [{"index": 3}]}}, "tool calls count from 0"),
        ({"delta": {"tool_calls": [{"index": "x"}]}}, "tool calls count from 0"),
        ({"delta": [1]}, "it sent JSON that is not a completion"),
        ({"delta": {}, "finish_reason": "stop"}, "it answered without a token"),
    ],
)
def test_a_wrong_chat_answer_is_an_error(choice: dict[str, Any], error: str) -> None:
    good = server_of()

    def answer(request: Request) -> Reply:
        if request.json["max_completion_tokens"] == 1:
            return good(request)
        return Reply([STREAM, chunk(event({"choices": [{"index": 0, **choice}]})), DONE])

    with (
        ScriptedServer(answer) as server,
        started(server, SERVER, "--endpoint_type=chat", sends_text=True) as core,
    ):
        core.enqueue(requests(PROMPTS[:1], max_output=5))
        assert error in failure(core)


@pytest.mark.parametrize(
    ("status", "fails"), [("400 Bad Request", False), ("500 Internal Server Error", True)]
)
def test_a_refused_prompt_fails_its_request_only(status: str, fails: bool) -> None:
    """As a prompt that outgrows the server's model, in a test of conversations. Other errors end the run."""
    good = server_of()

    def answer(request: Request) -> Reply:
        if request.json["messages"] == CHATS[1][0]:
            return plain({"error": {"message": "longer than the model's context"}}, status)
        return good(request)

    with (
        ScriptedServer(answer) as server,
        started(server, SERVER, "--endpoint_type=chat", sends_text=True) as core,
    ):
        flag = int(RequestFlag.MAY_BE_REFUSED)
        core.enqueue(requests(PROMPTS, max_output=5, flags=flag))
        if fails:
            assert "longer than the model's context" in failure(core)
            return
        rows = Rows(core).until(2)
        core.enqueue(requests(PROMPTS[1:], max_output=5))
        assert "longer than the model's context" in failure(core), "without the flag, it is the run's error"
    ended = {id_: (flags, len(tokens)) for id_, flags, tokens in rows if flags & FINAL}
    assert ended[10][1] == 5 and ended[11] == (FINAL | ResponseFlag.ERROR, 0)


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_a_request_has_its_rows_fields(kind: str) -> None:
    """They win over --extra_body and stop words of the run."""
    text = chat_prompt(CHATS[0][0]) if kind == "chat" else "Où"
    prompt = array("i", list(text.encode()))
    own = {"stop": ["x"], "a": 2, "response_format": {"type": "json_object"}}
    prompts = [prompt, with_fields(prompt, own)]
    option = '--extra_body={"a": 1, "b": 1}'
    usage = {"prompt_tokens": 3, "completion_tokens": 5}

    def complete(request: Request) -> Reply:
        return plain({"choices": [{"index": 0, "text": "t", "finish_reason": "length"}], "usage": usage})

    answers = server_of() if kind == "chat" else complete
    with (
        ScriptedServer(answers) as server,
        started(server, f"--endpoint_type={kind}", option, "--stop_words=y", sends_text=True) as core,
    ):
        core.enqueue(requests([one.tolist() for one in prompts], max_output=5))
        Rows(core).until(2)
        bodies = sorted(server.bodies()[-2:], key=len)
    fields = [[one.get(name) for name in ("stop", "a", "b", "response_format")] for one in bodies]
    assert fields == [[["y"], 1, 1, None], [["x"], 2, 1, {"type": "json_object"}]]
    assert all(one.get("messages", one.get("prompt")) in (CHATS[0][0], "Où") for one in bodies)


def test_a_prompt_is_the_beginning_of_the_next_one() -> None:
    first, second = (
        ChatRequests().encode_chats([messages], [TOOL])[0] for messages in ([{"a": 1}], [{"a": 1}, {}])
    )
    assert second[: len(first)] == first and second != first


@pytest.mark.parametrize("lacks", ["always", "in the test"])
def test_a_tokenizer_is_no_remedy_for_chats_without_usage(lacks: str) -> None:
    counts = server_of()

    def answer(request: Request) -> Reply:
        if lacks == "in the test" and request.json["max_completion_tokens"] == 1:
            return counts(request)
        message = {"index": 0, "message": MESSAGE, "finish_reason": "stop"}
        return plain({"choices": [message]})

    with (
        ScriptedServer(answer) as server,
        pytest.raises(RunError, match=r"usage.*: in answers to messages, the server must send usage"),
        started(server, "--endpoint_type=chat", sends_text=True) as core,
    ):
        core.enqueue(requests(PROMPTS, max_output=5, flags=int(RequestFlag.MESSAGE)))
        Rows(core).until(2)
