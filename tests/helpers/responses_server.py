"""A stand-in for a server of `/v1/responses`, in OpenAI's form, as vLLM 0.33 and SGLang 0.5.23 send it.

It stands in for them because neither is installed where these tests run. Its events and responses are valid
by the classes of OpenAI's package 3.57. It counts four characters as a token.
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
    """Return the complete response, cut after `max_output_tokens`. `more`: other values of its fields."""
    n_prompt = len(json.dumps([body.get("instructions"), body["input"]])) // 4
    usage = {"input_tokens": n_prompt, "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0}}
    usage |= {"output_tokens": body["max_output_tokens"], "output_tokens_details": {"reasoning_tokens": 1}}
    usage |= {"total_tokens": n_prompt + body["max_output_tokens"]}
    reason = {"reason": "max_output_tokens"}
    response = {"id": "resp_1", "object": "response", "created_at": 1, "model": body["model"]}
    options = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    status = {"status": "incomplete", "incomplete_details": reason, "error": None}
    return {**response, **options, **status, "output": output_of(body), "usage": usage, **more}


def events_of(body: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    """Return the events of a streamed response. `more`: see `response_of`."""
    events: list[dict[str, Any]] = []

    def add(kind: str, **fields: Any) -> None:
        events.append({"type": f"response.{kind}", "sequence_number": len(events), **fields})

    begun: dict[str, Any] = {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    add("created", response=response_of(body, **begun))
    for i, item in enumerate(output_of(body)):
        place = {"item_id": item["id"], "output_index": i}
        empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        add("output_item.added", output_index=i, item={**item, **empty})
        if item["type"] == "reasoning":
            add("reasoning_text.delta", **place, content_index=0, delta="Hm")
            add("reasoning_text.done", **place, content_index=0, text="Hm")
        elif item["type"] == "message":
            for piece in ("Hi ", "there"):
                add("output_text.delta", **place, content_index=0, delta=piece, logprobs=[])
            add("output_text.done", **place, content_index=0, text=TEXT, logprobs=[])
        else:
            for piece in ('{"a"', ": 1}"):
                add("function_call_arguments.delta", **place, delta=piece)
            add("function_call_arguments.done", **place, name=CALL["name"], arguments=CALL["arguments"])
        add("output_item.done", output_index=i, item=item)
    response = response_of(body, **more)
    add(response["status"], response=response)
    return events


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
