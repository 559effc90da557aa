"""Requests to `/v1/responses`: prompts are items, and answers come as events or whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from mpillm.comms.messages import RequestFlag, ResponseFlag
from mpillm.cores.openai_client.answer import AnswerError
from mpillm.cores.openai_client.dialect import RESPONSES, RESPONSES_DIALECTS, Sampling, body
from mpillm.cores.openai_client.responses_answer import answer_at
from mpillm.data.chat_request import responses_prompt
from mpillm.errors import RunError
from tests.helpers.endpoint_cores import FINAL, SERVER, Rows, failure, requests, started
from tests.helpers.responses_server import CALL, TEXT, events_of, response_of, responses, stream_of
from tests.helpers.scripted_server import Reply, Request, ScriptedServer, plain

TOOL = {"type": "function", "function": {"name": "ls", "parameters": {}}}
ITEM = {"type": "message", "role": "user", "content": "Où"}
PROMPTS = [
    list(responses_prompt([{"role": "user", "content": "Où"}]).encode()),
    list(responses_prompt([{"role": "user", "content": "Où"}], [TOOL]).encode()),
]
RESPONSES_TYPE = "--endpoint_type=responses"
REQUEST = {"model": "m", "input": [], "tools": [TOOL], "max_output_tokens": 9}


@pytest.mark.parametrize("options", [(), (SERVER,)], ids=["whole", "streams"])
def test_items_go_to_the_responses_endpoint(options: tuple[str, ...]) -> None:
    with (
        ScriptedServer(responses) as server,
        started(server, *options, RESPONSES_TYPE, sends_text=True) as core,
    ):
        wanted = RequestFlag.MESSAGE | RequestFlag.PROMPT_COUNTS
        core.enqueue(requests(PROMPTS, max_output=9, flags=int(wanted)))
        rows = Rows(core).until(2)
        statistics: dict[str, Any] = core.statistics()
        bodies = server.bodies()[-2:]
    flat = {"type": "function", "name": "ls", "parameters": {}}
    assert sorted((one.get("tools", []) for one in bodies), key=len) == [[], [flat]]
    for one in bodies:
        assert one["input"] == [ITEM] and one["max_output_tokens"] == 9 and one["store"] is False
        assert not one.keys() & {"messages", "prompt", "max_tokens", "stream_options"}
    assert [tokens for _, flags, tokens in rows if flags & FINAL] == [[0] * 9] * 2
    texts = [json.loads(bytes(tokens)) for _, flags, tokens in rows if flags & ResponseFlag.MESSAGE]
    function = {"name": CALL["name"], "arguments": CALL["arguments"]}
    call = {"id": "c1", "type": "function", "function": function}
    assert {"role": "assistant", "content": TEXT} in texts
    assert {"role": "assistant", "content": TEXT, "tool_calls": [call]} in texts
    counts = [tokens for _, flags, tokens in rows if flags & ResponseFlag.PROMPT_COUNTS]
    assert len(counts) == 2 and all(cached == 2 and n > 0 for n, cached in counts)
    if options:  # the reasoning comes first
        assert statistics["socket_first_answer_p50_ms"] >= statistics["socket_ttft_p50_ms"] > 0


def _failed(kind: str) -> Callable[[Request], Reply]:
    def answer(request: Request) -> Reply:
        sent = request.json
        if sent["max_output_tokens"] == 1:
            return responses(request)
        if kind == "failed":
            error = {"code": "server_error", "message": "out of memory"}
            return stream_of(events_of(sent, status="failed", error=error))
        if kind == "error":
            return stream_of([{"type": "error", "code": "x", "message": "out of memory", "param": None}])
        if kind == "text":
            return stream_of([{"type": "response.output_text.delta", "delta": 5}])
        return stream_of(events_of(sent)[:-1])

    return answer


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("failed", "it sent an error: out of memory"),
        ("error", "it sent an error: out of memory"),
        ("text", "it sent JSON that is not a completion"),
        ("cut", "it ended its answer in the middle: no response.completed"),
    ],
)
def test_a_wrong_answer_is_an_error(kind: str, error: str) -> None:
    with (
        ScriptedServer(_failed(kind)) as server,
        started(server, SERVER, RESPONSES_TYPE, sends_text=True) as core,
    ):
        core.enqueue(requests(PROMPTS[:1], max_output=5))
        assert error in failure(core)


def test_a_server_without_the_path_is_an_error_that_names_the_option() -> None:
    def none(request: Request) -> Reply:
        return plain({"error": {"message": "POST /v1/responses: Not Found"}}, "404 Not Found")

    with (
        ScriptedServer(none) as server,
        pytest.raises(RunError, match=r"Not Found.*see --endpoint_type"),
        started(server, RESPONSES_TYPE, sends_text=True),
    ):
        pass


def test_output_that_did_not_come_in_events() -> None:
    """Some servers send a tool call, or a short text, only in the complete response."""
    last = events_of(REQUEST)[-1]
    answer = answer_at(RESPONSES, True, 9)
    answer.feed(f"data: {json.dumps(last)}\n\n".encode(), 1.0)
    answer.finish(2.0)
    assert answer.message["content"] == TEXT and answer.message["tool_calls"][0]["id"] == "c1"
    assert answer.text.startswith("Hm" + TEXT) and answer.first_content == 1.0
    assert (answer.finish_reason, answer.completion_tokens, answer.cached_tokens) == ("length", 9, 2)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"status": "completed"}, "stop"),
        ({"incomplete_details": {"reason": "content_filter"}}, "content_filter"),
        ({"incomplete_details": None}, "incomplete"),
    ],
)
def test_how_a_response_ended(more: dict[str, Any], reason: str) -> None:
    answer = answer_at(RESPONSES, False, 9)
    answer.feed(json.dumps(response_of(REQUEST, **more)).encode(), 1.0)
    answer.finish(1.0)
    assert answer.finish_reason == reason


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"status": "cancelled"}, "status cancelled"),
        ({"status": "in_progress"}, "no response.completed"),
        ({"output": []}, "without a token"),
        ({"output": [{"type": "function_call", "name": 5}]}, "a tool call has texts"),
        ({"output": 5}, "not a completion"),
        ({"usage": {"input_tokens": "many"}}, "usage has whole numbers"),
        ({"output": [CALL] * 1025}, "more than"),
    ],
)
def test_an_invalid_response(more: dict[str, Any], error: str) -> None:
    answer = answer_at(RESPONSES, False, 9)
    with pytest.raises(AnswerError, match=error):
        answer.feed(json.dumps(response_of(REQUEST, **more)).encode(), 1.0)
        answer.finish(1.0)


def _body(**sampling: Any) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(
        body(RESPONSES_DIALECTS[0], "m", '"input":[', Sampling(8, **sampling), stream=True)
    )
    return made


def test_an_exact_length_needs_ignore_eos() -> None:
    """vLLM's and SGLang's `/v1/responses` have no `min_tokens`."""
    assert "ignore_eos" not in _body() and _body(min_tokens=8)["ignore_eos"] is True
    with pytest.raises(ValueError, match="/v1/responses has no min_tokens: leave --min_output_len out"):
        _body(min_tokens=4)
