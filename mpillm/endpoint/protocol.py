"""OpenAI's API as implemented here: parse and check a request's body.

The names are from OpenAI's completions and chat completions, and from vLLM's additions: `min_tokens`,
`ignore_eos`, `top_k`, `stop_token_ids`, `return_token_ids`, prompts as token ids. A request is rejected if it
sets a parameter that would change the answer and has no implementation (`parameters.py`). Other names have no
effect, as in vLLM.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError
from mpillm.comms.messages import NO_INSTANCE, RequestFlag
from mpillm.data.chat_template import Messages, Tools
from mpillm.data.dataset import PromptLimits
from mpillm.data.tokenizer import Tokenizer, TooLongError
from mpillm.endpoint.api_error import ApiError, Json
from mpillm.endpoint.body_values import flag, mapping, number, parse, text, token_ids
from mpillm.endpoint.parameters import check_body, check_message, refuse, tools_of
from mpillm.endpoint.sessions import session_of
from mpillm.files import excerpt

# Plain integers: operations on enum flags take ten times as long.
_IGNORE_EOS, _STREAM = int(RequestFlag.IGNORE_END | RequestFlag.IGNORE_STOP), int(RequestFlag.STREAM)
_MIN_TEMPERATURE = 0.01  # smaller temperatures overflow the division; vLLM has the same minimum
_MAX_PROMPTS = 2048  # in one body
_MAX_ANSWERS = 128  # to each prompt, as in OpenAI's API
_MAX_STOPS = 64
_MAX_STOP_CHARACTERS = 1024
_MAX_LOGPROBS = 20  # likeliest tokens with each token, as in OpenAI's API
_MAX_TOKENS = 1 << 20  # tokens of prompt and answer, if neither the model nor an option limits them
_MAX_SECONDS = 1e12  # difference between the clocks of two machines
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_OPENAI_COMPLETION_TOKENS = 16  # answer tokens of a text completion without max_tokens


@dataclass(frozen=True)
class ServedModel:
    """The model behind the endpoint, and defaults for requests."""

    names: tuple[str, ...]  # of the model; the first is in every answer
    tokenizer: Tokenizer
    limits: PromptLimits
    end_ids: frozenset[int] = frozenset()
    max_output_len: int = 128  # answer tokens of a chat without max_tokens
    # Defaults for requests; None: as in OpenAI's API.
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    min_output_len: int = 0
    gives_logprobs: bool = False  # supported by the core
    is_disagg: bool = False  # a context or generation server: accepts `disaggregated_params`

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of prompt and answer together."""
        return min(self.limits.max_seq_len or _MAX_TOKENS, _MAX_TOKENS)

    @property
    def vocab_size(self) -> int:
        return self.limits.vocab_size or self.tokenizer.vocab_size


@dataclass(frozen=True)
class CompletionRequest:
    """A parsed body. The length of its prompts is not checked yet."""

    chat: bool
    prompts: Sequence[str | list[int]]  # empty for a chat until `render`
    messages: Messages
    tools: Tools  # that the chat template receives
    max_tokens: int | None
    row: dict[str, float]  # fields of REQUEST
    n: int = 1  # answers to each prompt
    # How many of the likeliest tokens come with each token; None: no log probabilities
    logprobs: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    tokens_as_ids: bool = False  # log probabilities have "token_id:5" in place of a token's text
    add_special_tokens: bool = True  # around a prompt that is a text
    request_id: str = ""  # "": the server creates one
    # `disaggregated_params`, unchecked: see `DisaggRoutes.check`
    disaggregated: Json = field(default_factory=dict)
    prompt_token_ids: Any = None  # of a chat, unchecked; only context and generation servers use them

    @property
    def n_characters(self) -> int:
        """The number of characters to tokenize."""
        return sum(len(prompt) for prompt in self.prompts if isinstance(prompt, str))


def read(
    data: bytes, chat: bool, served: ServedModel, headers: Mapping[str, str] = MappingProxyType({})
) -> CompletionRequest:
    """Parse a request. Raises ApiError if it is invalid, or not supported here."""
    body = parse(data)
    model = body.get("model")
    if model is not None and model not in served.names:
        raise ApiError(
            404,
            f"the model {excerpt(model)} does not exist; this server has {served.names[0]}",
            "model",
            "model_not_found",
        )
    check_body(body)
    disaggregated = mapping(body, "disaggregated_params")
    if not served.is_disagg:
        for name in ("disaggregated_params", "prompt_token_ids"):
            if body.get(name):
                refuse(name, body[name])
    ignore_eos = flag(body, "ignore_eos")
    stop, stop_token_ids = (
        _stops(body),
        token_ids(body.get("stop_token_ids") or [], "stop_token_ids", served.vocab_size),
    )
    stream, options = stream_of(body)
    max_tokens = number(body, "max_tokens", 1, served.max_model_len, is_integer=True)
    if chat:
        max_tokens = (
            number(body, "max_completion_tokens", 1, served.max_model_len, is_integer=True) or max_tokens
        )
    elif max_tokens is None:
        max_tokens = min(_OPENAI_COMPLETION_TOKENS, served.max_model_len)
    min_tokens = number(body, "min_tokens", 0, served.max_model_len, is_integer=True)
    if min_tokens is not None and max_tokens is not None and min_tokens > max_tokens:
        raise ApiError(400, f"min_tokens {min_tokens} is more than max_tokens {max_tokens}", "min_tokens")
    flags = _IGNORE_EOS if ignore_eos else 0
    if stream or stop or stop_token_ids:  # the tokens are then checked as they arrive
        flags |= _STREAM
    prompts = () if chat else _prompts(body, served.vocab_size)
    logprobs = _logprobs(body, chat, served)
    n = int(number(body, "n", 1, _MAX_ANSWERS, is_integer=True) or 1)
    if n * len(prompts) > _MAX_PROMPTS:
        raise ApiError(400, f"n {n}: {n * len(prompts)} answers; a request may have {_MAX_PROMPTS}", "n")
    return CompletionRequest(
        chat=chat,
        prompts=prompts,
        messages=_messages(body) if chat else (),
        tools=tools_of(body, chat),
        max_tokens=None if max_tokens is None else int(max_tokens),
        n=n,
        logprobs=logprobs,
        row={
            **_sampling(body, served),
            "flags": flags,
            "generation": NO_INSTANCE,
            "logprobs": 0 if logprobs is None else 1 + logprobs,
            "session": session_of(headers, body),
            "salt": _salt(body),
        },
        min_tokens=int(served.min_output_len if min_tokens is None else min_tokens),
        stop=stop,
        stop_token_ids=frozenset(stop_token_ids),
        ignore_eos=ignore_eos,
        stream=stream,
        include_usage=options["include_usage"],
        continuous_usage=options["include_usage"] and options["continuous_usage_stats"],
        return_token_ids=flag(body, "return_token_ids"),
        tokens_as_ids=flag(body, "return_tokens_as_token_ids"),
        add_special_tokens=flag(body, "add_special_tokens", default=not chat),
        request_id=_request_id(body),
        disaggregated=disaggregated,
        prompt_token_ids=body.get("prompt_token_ids"),
    )


def _salt(body: Json) -> int:
    """Return the salt of REQUEST. Raises ApiError if `cache_salt` is not a string, or empty, as vLLM does."""
    if (value := body.get("cache_salt")) is None:
        return 0
    if not text(value, "cache_salt"):
        raise ApiError(400, "cache_salt: must not be empty", "cache_salt")
    return int.from_bytes(hashlib.blake2b(value.encode(), digest_size=8).digest(), "little") or 1


def stream_of(body: Json) -> tuple[bool, dict[str, bool]]:
    """Return whether the answer streams, and each of `stream_options`. Raises ApiError for wrong values."""
    stream, options = flag(body, "stream"), mapping(body, "stream_options")
    values = {name: flag(options, name) for name in ("include_usage", "continuous_usage_stats")}
    if options and not stream:
        raise ApiError(400, "stream_options: needs stream true", "stream_options")
    return stream, values


def read_clock_offset(data: bytes) -> float:
    """Return the clock offset that a leader sends, in seconds. Raises ApiError for an invalid body."""
    return number(parse(data), "offset", -_MAX_SECONDS, _MAX_SECONDS) or 0.0


def render(completion: CompletionRequest, served: ServedModel) -> CompletionRequest:
    """Return the request with the text of its chat as its prompt. May take long. Raises ApiError."""
    if not completion.chat or completion.prompts:
        return completion
    try:
        return replace(completion, prompts=(served.tokenizer.render(completion.messages, completion.tools),))
    except ConfigError as error:
        raise ApiError(400, str(error), "messages") from None


def encode(completion: CompletionRequest, served: ServedModel) -> list[tuple[NDArray[np.int32], int]]:
    """Return the tokens of each prompt, with the maximum tokens of its answer. May take long.

    Raises ApiError if a prompt does not fit the model.
    """
    limits, max_len = served.limits, served.max_model_len
    encoded: list[tuple[NDArray[np.int32], int]] = []
    param = "messages" if completion.chat else "prompt"
    tokenizer = served.tokenizer
    tokens_of = tokenizer.encode_text if completion.add_special_tokens else tokenizer.encode_plain
    is_text = any(isinstance(prompt, str) for prompt in completion.prompts)
    try:
        prompts = [tokens_of(p, max_len) if isinstance(p, str) else p for p in completion.prompts]
    except TooLongError as error:
        message = f"the model's context is {max_len} tokens; {param}: {error}"
        raise ApiError(400, message, param, "context_length_exceeded") from None
    except ConfigError as error:
        raise ApiError(400, str(error), param) from None
    for prompt in prompts:
        n = len(prompt)
        if not n:
            raise ApiError(400, f"{param} is empty: it has no tokens", param)
        free = max_len - n
        max_tokens = completion.max_tokens or max(1, min(served.max_output_len, free))
        if max_tokens > free:
            both = f"{n} of the prompt and {max_tokens} of the answer are {n + max_tokens}"
            message = f"the model's context is {max_len} tokens; {both}"
            raise ApiError(400, message, param, "context_length_exceeded")
        if completion.min_tokens > max(max_tokens, served.min_output_len):  # with `max_tokens`, `read` checks
            message = f"min_tokens {completion.min_tokens} is more than max_tokens, by default {max_tokens}"
            raise ApiError(400, message, "min_tokens")
        if limits.max_prompt_len is not None and n > limits.max_prompt_len:
            message = (
                f"{param}: {n} tokens; at most {limits.max_prompt_len} without chunked context"
                " (--enable_chunked_context)"
            )
            raise ApiError(400, message, param, "context_length_exceeded")
        if is_text and max(prompt) >= served.vocab_size:
            raise ApiError(
                400,
                f"{param}: the tokenizer gave token {max(prompt)}, but the model has {served.vocab_size}:"
                " the server's tokenizer and model do not match",
                param,
            )
        encoded.append((np.array(prompt, np.int32), max_tokens))
    return encoded


def _prompts(body: Json, vocab_size: int) -> Sequence[str | list[int]]:
    """Return the prompts: the body has one text, one list of token ids, or an array of either."""
    prompt = body.get("prompt")
    if prompt is None:
        raise ApiError(400, "prompt is missing", "prompt")
    if isinstance(prompt, str):
        return [text(prompt, "prompt")]
    if not isinstance(prompt, list) or not prompt:
        raise ApiError(400, "prompt: expected a string, token ids, or an array of either", "prompt")
    if isinstance(prompt[0], (int, float)):
        return [token_ids(prompt, "prompt", vocab_size)]
    if len(prompt) > _MAX_PROMPTS:
        raise ApiError(400, f"prompt: {len(prompt)} prompts; a request may have {_MAX_PROMPTS}", "prompt")
    return [token_ids(p, "prompt", vocab_size) if isinstance(p, list) else text(p, "prompt") for p in prompt]


def _messages(body: Json) -> Messages:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages: expected an array of at least one message", "messages")
    return [_message(message) for message in messages]


def _message(message: Any) -> Json:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(400, "messages: each must be an object with a role and content", "messages")
    check_message(message)
    content = message.get("content")
    if isinstance(content, list):  # of parts
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
            for part in content
        ]
        if not all(isinstance(part, str) for part in parts):
            raise ApiError(400, "messages: content may only have parts of type text", "messages")
        content = "".join(map(str, parts))
    calls = _tool_calls(message)
    if content is None and calls:
        content = ""
    result = {"role": message["role"], "content": content}
    result |= {name: message[name] for name in _MESSAGE_TEXTS if message.get(name) is not None}
    checked: Json = {key: text(value, "messages") for key, value in result.items()}
    return {**checked, "tool_calls": calls} if calls else checked


def _tool_calls(message: Json) -> list[Json]:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(
        isinstance(call, dict)
        and isinstance(call.get("function"), dict)
        and isinstance(call["function"].get("name"), str)
        for call in calls
    ):
        raise ApiError(400, "messages: tool_calls must be an array of objects with function.name", "messages")
    return calls


_MESSAGE_TEXTS = ("name", "tool_call_id", "reasoning", "reasoning_content")  # besides role and content


def _request_id(body: Json) -> str:
    value = body.get("request_id")
    if value is None:
        return ""
    if not REQUEST_ID.fullmatch(text(value, "request_id")):
        expected = "expected 1 to 128 letters, digits, or any of . _ : -"
        raise ApiError(400, f"request_id {excerpt(value)}: {expected}", "request_id")
    return str(value)


def _sampling(body: Json, served: ServedModel) -> dict[str, float]:
    temperature = number(body, "temperature", 0, 100)
    if temperature is None:
        temperature = 1.0 if served.temperature is None else served.temperature
    top_p = number(body, "top_p", 0, 1)
    if top_p == 0:
        raise ApiError(400, "top_p 0: expected more than 0, at most 1", "top_p")
    top_k = number(body, "top_k", -1, 2**31 - 1, is_integer=True)
    seed = number(body, "seed", -(2**63), 2**64 - 1, is_integer=True)
    if seed is None:
        seed = random.getrandbits(32) if served.seed is None else served.seed
    return {
        "temperature": max(temperature, _MIN_TEMPERATURE) if temperature else 0.0,
        "top_k": max(0, int((served.top_k or 0) if top_k is None else top_k)),
        "top_p": (served.top_p or 1.0) if top_p is None else max(top_p, 1e-6),
        "seed": int(seed) & 0xFFFFFFFF,
    }


def _logprobs(body: Json, chat: bool, served: ServedModel) -> int | None:
    """Return the requested number of likeliest tokens; None: no log probabilities.

    In a text completion, `logprobs` is this number. In a chat it is a boolean, and `top_logprobs` the number.
    """
    if chat:
        n_tokens = number(body, "top_logprobs", 0, _MAX_LOGPROBS, is_integer=True)
        if not flag(body, "logprobs"):
            if n_tokens:
                raise ApiError(400, "top_logprobs: needs logprobs true", "top_logprobs")
            return None
        n_tokens = n_tokens or 0
    elif isinstance(body.get("logprobs"), bool):
        n_tokens = 0 if body["logprobs"] else None
    else:
        n_tokens = number(body, "logprobs", 0, _MAX_LOGPROBS, is_integer=True)
    if n_tokens is None:
        return None
    if not served.gives_logprobs:
        raise ApiError(
            400, "logprobs: the core here gives no log probabilities", "logprobs", "unsupported_parameter"
        )
    return int(n_tokens)


def _stops(body: Json) -> tuple[str, ...]:
    stop = body.get("stop")
    strings = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(strings, list)
        or not all(isinstance(one, str) for one in strings)
        or len(strings) > _MAX_STOPS
    ):
        raise ApiError(400, f"stop: expected a string, or an array of at most {_MAX_STOPS} strings", "stop")
    if sum(map(len, strings)) > _MAX_STOP_CHARACTERS:  # each token is compared with each string
        raise ApiError(400, f"stop: expected at most {_MAX_STOP_CHARACTERS} characters in all", "stop")
    return tuple(text(one, "stop") for one in strings if one)
