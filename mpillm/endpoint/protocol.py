"""OpenAI's API as it is spoken here: what a body asks for, and what is wrong with it.

The names are those of OpenAI's completions and chat completions, and of vLLM's additions to them:
`min_tokens`, `ignore_eos`, `top_k`, `stop_token_ids`, `return_token_ids`, prompts as token ids. A request is
refused if it sets a parameter that would change the answer and has no implementation (`parameters.py`). Other
names have no effect, as with vLLM.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError
from mpillm.comms.messages import NO_INSTANCE, RequestFlag
from mpillm.data.dataset import PromptLimits
from mpillm.data.tokenizer import Messages, Tokenizer, TooLongError
from mpillm.endpoint.api_error import ApiError, Json
from mpillm.endpoint.body_values import flag, mapping, number, parse, text, token_ids
from mpillm.endpoint.parameters import check_body, check_message, refuse
from mpillm.files import excerpt

# Plain numbers: operations on flags take ten times as long.
_IGNORE_EOS, _STREAM = int(RequestFlag.IGNORE_END | RequestFlag.IGNORE_STOP), int(RequestFlag.STREAM)
_LEAST_TEMPERATURE = 0.01  # smaller temperatures overflow the division; vLLM uses this in their place, too
_MOST_PROMPTS = 2048  # of one body
_MOST_ANSWERS = 128  # to each of them; as OpenAI's API
_MOST_STOPS = 64
_MOST_STOP_CHARACTERS = 1024
_MOST_LOGPROBS = 20  # of the likeliest tokens; as OpenAI's API
_MOST_TOKENS = 1 << 20  # tokens of prompt and answer, if neither the model nor an option limits them
_OF_TEMPLATE = 8  # characters that a chat template puts around a message, or more
_MOST_SECONDS = 1e12  # between the clocks of two machines
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_OPENAI_COMPLETION_TOKENS = 16  # of a text completion that does not say how many


@dataclass(frozen=True)
class Served:
    """What is behind the endpoint."""

    names: tuple[str, ...]  # of the model; the first is in every answer
    tokenizer: Tokenizer
    limits: PromptLimits
    end_ids: frozenset[int] = frozenset()
    max_output_len: int = 128  # of a chat that does not say how many
    # Defaults for requests; None: as OpenAI's API has it.
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    min_output_len: int = 0
    gives_logprobs: bool = False  # the core does
    is_disagg: bool = False  # a context or generation server: takes `disaggregated_params`

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer."""
        return min(self.limits.max_seq_len or _MOST_TOKENS, _MOST_TOKENS)

    @property
    def vocab_size(self) -> int:
        return self.limits.vocab_size or self.tokenizer.vocab_size


@dataclass(frozen=True)
class Asked:
    """What a body asks for. Whether its prompts are too long is not checked yet."""

    chat: bool
    prompts: Sequence[str | list[int]]  # one, for a chat: empty
    messages: Messages
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
    add_special_tokens: bool = True  # those that frame any text, if the prompt is one
    request_id: str = ""  # "": the server makes one
    # `disaggregated_params`, unchecked: see `DisaggRoutes.check`
    disaggregated: Json = field(default_factory=dict)
    prompt_token_ids: Any = None  # of a chat, unchecked; only halves of disaggregated serving look at them

    @property
    def n_characters(self) -> int:
        """The number of characters to tokenise, about."""
        return sum(len(prompt) for prompt in self.prompts if isinstance(prompt, str)) + sum(
            sum(map(len, message.values())) + _OF_TEMPLATE for message in self.messages
        )


def read(data: bytes, chat: bool, served: Served) -> Asked:
    """Return what a body asks for. Raises ApiError if it makes no sense, or can't be done here."""
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
    max_tokens = number(body, "max_tokens", 1, served.max_model_len, whole=True)
    if chat:
        max_tokens = number(body, "max_completion_tokens", 1, served.max_model_len, whole=True) or max_tokens
    elif max_tokens is None:
        max_tokens = min(_OPENAI_COMPLETION_TOKENS, served.max_model_len)
    min_tokens = number(body, "min_tokens", 0, served.max_model_len, whole=True)
    if min_tokens is not None and max_tokens is not None and min_tokens > max_tokens:
        raise ApiError(400, f"min_tokens {min_tokens} is more than max_tokens {max_tokens}", "min_tokens")
    flags = _IGNORE_EOS if ignore_eos else 0
    if stream or stop or stop_token_ids:  # its tokens are then checked as they arrive
        flags |= _STREAM
    prompts = () if chat else _prompts(body, served.vocab_size)
    logprobs = _logprobs(body, chat, served)
    n = int(number(body, "n", 1, _MOST_ANSWERS, whole=True) or 1)
    if n * len(prompts) > _MOST_PROMPTS:
        raise ApiError(400, f"n {n}: {n * len(prompts)} answers; a request may have {_MOST_PROMPTS}", "n")
    return Asked(
        chat=chat,
        prompts=prompts,
        messages=_messages(body) if chat else (),
        max_tokens=None if max_tokens is None else int(max_tokens),
        n=n,
        logprobs=logprobs,
        row={
            **_sampling(body, served),
            "flags": flags,
            "generation": NO_INSTANCE,
            "logprobs": 0 if logprobs is None else 1 + logprobs,
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


def stream_of(body: Json) -> tuple[bool, dict[str, bool]]:
    """Return whether the answer streams, and each of `stream_options`. Raises ApiError for wrong values."""
    stream, options = flag(body, "stream"), mapping(body, "stream_options")
    values = {name: flag(options, name) for name in ("include_usage", "continuous_usage_stats")}
    if options and not stream:
        raise ApiError(400, "stream_options: needs stream true", "stream_options")
    return stream, values


def read_clock_offset(data: bytes) -> float:
    """Return the seconds that a leader wants added to times. Raises ApiError if the body makes no sense."""
    return number(parse(data), "offset", -_MOST_SECONDS, _MOST_SECONDS) or 0.0


def render(asked: Asked, served: Served) -> str:
    """Return the text of a chat. May take long, and keeps Python busy all the while. Raises ApiError."""
    try:
        return served.tokenizer.render(asked.messages)
    except ConfigError as error:
        raise ApiError(400, str(error), "messages") from None


def encode(asked: Asked, served: Served, chat: str | None = None) -> list[tuple[NDArray[np.int32], int]]:
    """Return the tokens of each prompt and how many its answer may have. May take long.

    `chat`: its text, if it is one and that is known. Raises ApiError if that does not fit the model.
    """
    limits, most = served.limits, served.max_model_len
    made: list[tuple[NDArray[np.int32], int]] = []
    param = "messages" if asked.chat else "prompt"
    tokenizer = served.tokenizer
    tokens_of = tokenizer.encode_text if asked.add_special_tokens else tokenizer.encode_rendered
    is_text = not asked.prompts or any(isinstance(prompt, str) for prompt in asked.prompts)
    try:
        if asked.chat and not asked.prompts:
            text = render(asked, served) if chat is None else chat
            prompts = [tokens_of(text, most)]
        else:
            prompts = [tokens_of(p, most) if isinstance(p, str) else p for p in asked.prompts]
    except TooLongError as error:
        message = f"the model's context is {most} tokens; {param}: {error}"
        raise ApiError(400, message, param, "context_length_exceeded") from None
    except ConfigError as error:
        raise ApiError(400, str(error), param) from None
    for prompt in prompts:
        n = len(prompt)
        if not n:
            raise ApiError(400, f"{param} is empty: it has no tokens", param)
        room = most - n
        wanted = asked.max_tokens or max(1, min(served.max_output_len, room))
        if wanted > room:
            both = f"{n} of the prompt and {wanted} of the answer are {n + wanted}"
            message = f"the model's context is {most} tokens; {both}"
            raise ApiError(400, message, param, "context_length_exceeded")
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
        made.append((np.array(prompt, np.int32), wanted))
    return made


def _prompts(body: Json, vocab_size: int) -> Sequence[str | list[int]]:
    """Return texts and token ids: the body has one of either, or an array."""
    prompt = body.get("prompt")
    if prompt is None:
        raise ApiError(400, "prompt is missing", "prompt")
    if isinstance(prompt, str):
        return [text(prompt, "prompt")]
    if not isinstance(prompt, list) or not prompt:
        raise ApiError(400, "prompt: expected a string, token ids, or an array of either", "prompt")
    if isinstance(prompt[0], (int, float)):
        return [token_ids(prompt, "prompt", vocab_size)]
    if len(prompt) > _MOST_PROMPTS:
        raise ApiError(400, f"prompt: {len(prompt)} prompts; a request may have {_MOST_PROMPTS}", "prompt")
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
    made = {"role": message["role"], "content": content}
    if message.get("name") is not None:
        made["name"] = message["name"]
    return {key: text(value, "messages") for key, value in made.items()}


def _request_id(body: Json) -> str:
    value = body.get("request_id")
    if value is None:
        return ""
    if not REQUEST_ID.fullmatch(text(value, "request_id")):
        expected = "expected 1 to 128 letters, digits, or any of . _ : -"
        raise ApiError(400, f"request_id {excerpt(value)}: {expected}", "request_id")
    return str(value)


def _sampling(body: Json, served: Served) -> dict[str, float]:
    temperature = number(body, "temperature", 0, 100)
    if temperature is None:
        temperature = 1.0 if served.temperature is None else served.temperature
    top_p = number(body, "top_p", 0, 1)
    if top_p == 0:
        raise ApiError(400, "top_p 0: expected more than 0, at most 1", "top_p")
    top_k = number(body, "top_k", -1, 2**31 - 1, whole=True)
    seed = number(body, "seed", -(2**63), 2**64 - 1, whole=True)
    if seed is None:
        seed = random.getrandbits(32) if served.seed is None else served.seed
    return {
        "temperature": max(temperature, _LEAST_TEMPERATURE) if temperature else 0.0,
        "top_k": max(0, int((served.top_k or 0) if top_k is None else top_k)),
        "top_p": (served.top_p or 1.0) if top_p is None else max(top_p, 1e-6),
        "seed": int(seed) & 0xFFFFFFFF,
    }


def _logprobs(body: Json, chat: bool, served: Served) -> int | None:
    """Return how many likeliest tokens are wanted, None for no log probabilities.

    A text completion has the number; a chat has true or false, and the number in `top_logprobs`.
    """
    if chat:
        wanted = number(body, "top_logprobs", 0, _MOST_LOGPROBS, whole=True)
        if not flag(body, "logprobs"):
            if wanted:
                raise ApiError(400, "top_logprobs: needs logprobs true", "top_logprobs")
            return None
        wanted = wanted or 0
    elif isinstance(body.get("logprobs"), bool):
        wanted = 0 if body["logprobs"] else None
    else:
        wanted = number(body, "logprobs", 0, _MOST_LOGPROBS, whole=True)
    if wanted is None:
        return None
    if not served.gives_logprobs:
        raise ApiError(
            400, "logprobs: the core here gives no log probabilities", "logprobs", "unsupported_parameter"
        )
    return int(wanted)


def _stops(body: Json) -> tuple[str, ...]:
    stop = body.get("stop")
    strings = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(strings, list)
        or not all(isinstance(one, str) for one in strings)
        or len(strings) > _MOST_STOPS
    ):
        raise ApiError(400, f"stop: expected a string, or an array of at most {_MOST_STOPS} strings", "stop")
    if sum(map(len, strings)) > _MOST_STOP_CHARACTERS:  # each token is compared with each of them
        raise ApiError(400, f"stop: expected at most {_MOST_STOP_CHARACTERS} characters in all", "stop")
    return tuple(text(one, "stop") for one in strings if one)
