"""The prompt of a request to a chat endpoint: the first members of its JSON, `tools` and `messages`.

The array `messages` stays open, and the client closes it. So a request of a conversation begins with the
complete prompt of the request before it, like the tokens that a server makes of them. A request to
`/v1/responses` has `tools`, `instructions` and `input` in the same way. Source of its form: OpenAI's
reference of its API.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError
from mpillm.data.chat_template import Messages, Tools
from mpillm.data.tokenizer import ByteTokenizer
from mpillm.files import excerpt

TOKENS_AS_CHAT = (
    "prompts are token ids, which cannot be sent as a chat; give texts or messages, or use"
    " --endpoint_type completions"
)


def chat_prompt(messages: Messages, tools: Tools = None) -> str:
    """Return the prompt of a request with these messages. Raises ValueError if they are not JSON."""
    first = f'"tools":{_json(tools)},' if tools else ""
    return f'{first}"messages":[{",".join(map(_json, messages))}'


def responses_prompt(messages: Messages, tools: Tools = None) -> str:
    """Return the prompt of a request for a response. A system message that comes first is `instructions`.

    Raises ValueError if the messages are not JSON, and ConfigError for a tool or a call without its name.
    """
    first = f'"tools":{_json([_flat_tool(tool) for tool in tools])},' if tools else ""
    if messages and messages[0]["role"] == "system":
        first += f'"instructions":{_json(messages[0]["content"])},'
        messages = messages[1:]
    return f'{first}"input":[{",".join(map(_json, _items(messages)))}'


def _items(messages: Messages) -> Iterator[dict[str, Any]]:
    """Yield messages as input items: texts, calls of tools and their results.

    Names of speakers and earlier reasoning have no place in items. Calls without an id get their number.
    """
    pending: list[str] = []  # calls without a result
    n_calls = 0
    for message in messages:
        content = message.get("content") or ""
        if message["role"] == "tool":
            call_id = message.get("tool_call_id") or (pending[0] if pending else "")
            pending = [one for one in pending if one != call_id]
            yield {"type": "function_call_output", "call_id": call_id, "output": content}
            continue
        if content or not message.get("tool_calls"):
            yield {"type": "message", "role": message["role"], "content": content}
        for call in message.get("tool_calls") or ():
            n_calls += 1
            item = _call_item(call, f"call_{n_calls}")
            pending.append(item["call_id"])
            yield item


def _call_item(call: Any, default_id: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ConfigError(f"tool_calls has {excerpt(call)}; must be objects with function, which has a name")
    arguments = function.get("arguments", "")
    return {
        "type": "function_call",
        "call_id": call.get("id") or default_id,
        "name": function["name"],
        "arguments": arguments if isinstance(arguments, str) else _json(arguments),
    }


def _flat_tool(tool: Any) -> Mapping[str, Any]:
    """Return a tool of a chat in the form of `/v1/responses`. A tool in that form stays as it is."""
    if not isinstance(tool, dict):
        raise ConfigError(f"tools has {excerpt(tool)}; must be objects")
    function = tool.get("function")
    return {"type": "function", **function} if isinstance(function, dict) else tool


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class ChatRequests(ByteTokenizer):
    """The "tokenizer" of requests to a chat endpoint: their prompts' bytes are the tokens."""

    prompt: Callable[[Messages, Tools], str] = staticmethod(chat_prompt)

    def encode(self, prompt: str) -> list[int]:
        return list(self.prompt([{"role": "user", "content": prompt}], None).encode())

    def encode_batch(self, prompts: Sequence[str]) -> list[list[int]]:
        return [self.encode(prompt) for prompt in prompts]

    def encode_chats(self, chats: Sequence[Messages], tools: Tools = None) -> list[list[int]]:
        return [self.tokens_of(messages, tools).tolist() for messages in chats]

    def tokens_of(self, messages: Messages, tools: Tools = None) -> NDArray[np.int32]:
        """Return the tokens of a request with these messages. Raises as `prompt`."""
        return np.frombuffer(self.prompt(messages, tools).encode(), np.uint8).astype(np.int32)


class ResponsesRequests(ChatRequests):
    """The "tokenizer" of requests to `/v1/responses`."""

    prompt = staticmethod(responses_prompt)


REQUESTS: Mapping[str, ChatRequests] = {"chat": ChatRequests(), "responses": ResponsesRequests()}
"""By --endpoint_type. Completions have prompts, not messages."""
