"""A stand-in for a server of `/v1/responses`, in OpenAI's form, as vLLM 0.33 and SGLang 0.5.23 send it.

It stands in for them because neither runs without a GPU here. It counts four characters as a token.
"""

from __future__ import annotations

import json
from typing import Any

from tests.helpers.scripted_server import STREAM, Reply, Request, chunk, plain

PATH = "/v1/responses"
TEXT = "Hi there"
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "ls", "arguments": '{"a": 1}'}


def output_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return reasoning and a text; with tools, also a call."""
    reasoning: dict[str, Any] = {"type": "reasoning", "id": "rs_1", "summary": [], "content": []}
    reasoning["content"] = [{"type": "reasoning_text", "text": "Hm"}]
    text = {"type": "output_text", "text": TEXT, "annotations": []}
    message = {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [text],
    }
    return [reasoning, message, *([CALL] if body.get("tools") else [])]


def response_of(body: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the complete response, cut after `max_output_tokens`."""
    n_prompt = len(json.dumps([body.get("instructions"), body["input"]])) // 4
    usage = {"input_tokens": n_prompt, "input_tokens_details": {"cached_tokens": 2}, "total_tokens": 0}
    usage |= {"output_tokens": body["max_output_tokens"], "output_tokens_details": {"reasoning_tokens": 1}}
    reason = {"reason": "max_output_tokens"}
    response = {"id": "resp_1", "object": "response", "model": body["model"], "output": output_of(body)}
    status = {"status": "incomplete", "incomplete_details": reason, "error": None}
    return {**response, **status, "usage": usage, **more}


def events_of(body: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    """Return the events of a streamed response. `more`: fields of the complete one."""
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": {"id": "resp_1", "status": "in_progress", "output": []}}
    ]
    for i, item in enumerate(output_of(body)):
        events.append(
            {"type": "response.output_item.added", "output_index": i, "item": {"type": item["type"]}}
        )
        if item["type"] == "reasoning":
            events.append({"type": "response.reasoning_text.delta", "output_index": i, "delta": "Hm"})
        elif item["type"] == "message":
            pieces = ("Hi ", "there")
            events += [{"type": "response.output_text.delta", "delta": piece} for piece in pieces]
            events.append({"type": "response.output_text.done", "text": TEXT})
        else:
            kind = "response.function_call_arguments.delta"
            events += [{"type": kind, "delta": piece} for piece in ('{"a"', ": 1}")]
        events.append({"type": "response.output_item.done", "output_index": i, "item": item})
    response = response_of(body, **more)
    return [*events, {"type": f"response.{response['status']}", "response": response}]


def stream_of(events: list[dict[str, Any]]) -> Reply:
    """Return a stream of events, each with its name, as these servers send it."""
    pieces = [f"event: {one['type']}\ndata: {json.dumps(one)}\n\n".encode() for one in events]
    return Reply([STREAM, *map(chunk, pieces), chunk(b"")])


def responses(request: Request) -> Reply:
    """Answer a request, streamed or not."""
    body = request.json
    if request.path != PATH:
        return plain({"error": {"message": "no such path"}}, "404 Not Found")
    return stream_of(events_of(body)) if body.get("stream") else plain(response_of(body))
