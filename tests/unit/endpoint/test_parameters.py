"""Every parameter of vLLM's API has its effect, or gets 400 with its name."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from mpillm.data.dataset import PromptLimits
from mpillm.data.tokenizer import ByteTokenizer
from mpillm.endpoint.api_error import ApiError
from mpillm.endpoint.choices import Choice
from mpillm.endpoint.open_requests import PendingResponse
from mpillm.endpoint.protocol import CompletionRequest, ServedModel, encode, read, render
from mpillm.endpoint.shapes import usage
from tests.helpers.http_api import ROUTES, api, body_for, run
from tests.helpers.vllm_parameters import CHAT, COMPLETION, MESSAGE, SAME, STREAM_OPTIONS

SERVED = ServedModel(("m",), ByteTokenizer(), PromptLimits(256, 64), seed=0, gives_logprobs=True)
HELLO = {"role": "user", "content": "hello"}
PLAIN = {False: {"prompt": "hello", "stream": True}, True: {"messages": [HELLO], "stream": True}}
CASES = [(chat, name) for chat, names in ((False, COMPLETION), (True, CHAT)) for name in names]
WITHOUT_EFFECT = {"spaces_between_special_tokens", "parallel_tool_calls"}


def request_of(chat: bool, **more: Any) -> CompletionRequest:
    return read(json.dumps(PLAIN[chat] | more).encode(), chat, SERVED)


@pytest.mark.parametrize(("chat", "name"), CASES)
def test_each_parameter_has_an_effect_or_is_refused(chat: bool, name: str) -> None:
    neutral, effective = (CHAT if chat else COMPLETION)[name]
    base = {"logprobs": True if chat else 1} if name == "top_logprobs" else {}
    if neutral is not SAME:
        assert request_of(chat, **base | {name: neutral}) == request_of(chat, **base)
    if effective is SAME:
        assert name in WITHOUT_EFFECT
        return
    try:
        assert request_of(chat, **base | {name: effective}) != request_of(chat, **base)
    except ApiError as error:
        assert (error.status, error.param) == (404 if name == "model" else 400, name)
        assert name in str(error)


def test_functions_that_the_request_forbids_have_no_effect() -> None:
    functions = [{"type": "function", "function": {"name": "f"}}]
    assert request_of(True, functions=functions, function_call="none") == request_of(True)
    with pytest.raises(ApiError, match="functions"):
        request_of(True, functions=functions, function_call="auto")
    assert request_of(True, tools=functions, tool_choice="none") == request_of(True)
    for more in ({}, {"tool_choice": "auto"}):
        assert request_of(True, tools=functions, **more).tools == functions
    for tools in ("f", ["f"], {"f": 1}):
        with pytest.raises(ApiError, match="tools"):
            request_of(True, tools=tools)


def test_a_chat_template_receives_tools_and_their_calls() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": "2"}
    request = request_of(True, messages=[HELLO, answer, result])
    assert request.messages == [HELLO, answer | {"content": ""}, result]
    several: tuple[Any, ...] = ("f", ["f"], [{}], [{"function": {}}])
    for wrong in several:
        with pytest.raises(ApiError, match="tool_calls must be an array"):
            request_of(True, messages=[HELLO, {"role": "assistant", "content": "", "tool_calls": wrong}])


@pytest.mark.parametrize("name", MESSAGE)
def test_each_part_of_a_message_has_an_effect_or_is_refused(name: str) -> None:
    neutral, effective = MESSAGE[name]
    if neutral is not SAME:
        assert request_of(True, messages=[HELLO | {name: neutral}]) == request_of(True)
    try:
        assert request_of(True, messages=[HELLO | {name: effective}]) != request_of(True)
    except ApiError as error:
        assert (error.status, error.param) == (400, "messages") and name in str(error)


def test_options_of_a_stream() -> None:
    """They need a stream; usage in each chunk also needs `include_usage`."""
    for name, (neutral, effective) in STREAM_OPTIONS.items():
        assert request_of(False, stream_options={name: neutral}) == request_of(False)
        others = {other: True for other in STREAM_OPTIONS if other != name}
        assert request_of(False, stream_options=others | {name: effective}) != request_of(
            False, stream_options=others | {name: neutral}
        )
        with pytest.raises(ApiError) as error:
            request_of(False, stream=False, stream_options={name: effective})
        assert (error.value.status, error.value.param) == (400, "stream_options")
    assert not request_of(False, stream_options={"continuous_usage_stats": True}).continuous_usage
    assert request_of(False, stream=False, stream_options={}) == request_of(False, stream=False)


@pytest.mark.parametrize("value", ["", "a b", "a" * 129, "é", 5])
def test_an_id_that_no_header_may_have(value: Any) -> None:
    with pytest.raises(ApiError) as error:
        request_of(False, request_id=value)
    assert (error.value.status, error.value.param) == (400, "request_id")


def test_booleans_are_not_numbers() -> None:
    """In Python 1 equals True and 0 equals False."""
    for name, value in (("min_p", False), ("best_of", True), ("echo", 0), ("add_generation_prompt", 1)):
        with pytest.raises(ApiError):
            request_of(True, **{name: value})


class Framed(ByteTokenizer):
    """A tokenizer that puts token 1 before a text."""

    def encode_text(self, text: str, max_tokens: int | None = None) -> list[int]:
        return [1, *super().encode_text(text, max_tokens)]

    def encode_plain(self, text: str, max_tokens: int | None = None) -> list[int]:
        return super().encode_text(text, max_tokens)


@pytest.mark.parametrize("chat", [False, True])
def test_special_tokens_around_a_prompt(chat: bool) -> None:
    """A text has them unless the request refuses them, a chat only on request, token ids never."""
    served = ServedModel(("m",), Framed(), PromptLimits(256, 64))

    def first(**more: Any) -> int:
        body = {"messages": [HELLO], "prompt": "hello"} | more
        request = read(json.dumps(body).encode(), chat, served)
        ((prompt, _),) = encode(render(request, served), served)
        return int(prompt[0])

    assert (first() == 1) is not chat
    assert first(add_special_tokens=True) == 1 and first(add_special_tokens=False) == ord("h")
    assert chat or first(prompt=[5], add_special_tokens=True) == 5


def test_cached_tokens_in_usage() -> None:
    """Each prompt counts once. Without a report of an instance, the field is left out."""

    def choice(i: int, cached: int | None) -> Choice:
        answer = PendingResponse.of(40, [1, 2])
        answer.cached = cached
        return Choice(i, answer, np.zeros(40, np.int32), 2, request_of(False), SERVED)

    choices = [choice(i, cached) for i, cached in enumerate([32, 16, 0, 32])]
    assert usage(choices, 2)["prompt_tokens_details"] == {"cached_tokens": 32}
    assert usage(choices[2:3], 1)["prompt_tokens_details"] == {"cached_tokens": 0}
    assert "prompt_tokens_details" not in usage([*choices, choice(4, None)], 1)


@ROUTES
def test_the_id_of_a_request(path: str) -> None:
    """The header's, or else the body's; it is in the answer and in the answer's header."""

    async def test() -> None:
        async with api() as a:
            for headers, expected in (({}, "mine"), ({"X-Request-Id": "theirs"}, "theirs")):
                body = body_for(path) | {"request_id": "mine", "max_tokens": 2}
                async with await a.post(path, body, **headers) as response:
                    made = await response.json()
                    assert made["id"].partition("-")[2] == response.headers["X-Request-Id"] == expected

    run(test)
