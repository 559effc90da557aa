"""Requests to OpenAI's `/v1/completions`, `/v1/chat/completions` and `/v1/responses`.

Sources: vLLM's `CompletionRequest` and `ChatCompletionRequest` (`return_token_ids`, `min_tokens`, `top_k`,
token-id prompts), the same classes of TensorRT-LLM (`tensorrt_llm/serve/openai_protocol.py`: reject unknown
fields; `detokenize: false` gives token ids), and `transformers serve` (`cli/serving/completion.py`: text
only, rejects unknown fields). `/v1/responses`: OpenAI's reference of its API, and the classes
`ResponsesRequest` of vLLM 0.33 and SGLang 0.5.23, which have no `min_tokens`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
PATHS = {"completions": COMPLETIONS, "chat": CHAT, "responses": RESPONSES}
"""Paths of requests, by --endpoint_type."""


@dataclass(frozen=True)
class Dialect:
    """The form of requests to one kind of server."""

    name: str
    token_prompts: bool = True  # prompts are token ids; otherwise text
    token_ids: bool = True  # answers have token ids; otherwise text, which is tokenized here
    extra: Mapping[str, Any] = field(default_factory=dict)
    options: bool = True  # requests may have min_tokens, top_k and stop_token_ids
    sends_text: bool = False  # a prompt's tokens here are the bytes of its text; the server counts tokens
    usage_option: bool = True  # a stream has usage (token counts) if `stream_options` requests it
    path: str = COMPLETIONS

    @property
    def sends_messages(self) -> bool:
        """Whether prompts are messages: see `mpillm.data.chat_request`."""
        return self.path != COMPLETIONS


# In the order of the probes: the first that a server understands is used.
DIALECTS = (
    Dialect("return_token_ids", extra={"return_token_ids": True}),
    Dialect("detokenize: false", extra={"detokenize": False}),
    Dialect("token-id prompts, text answers", token_ids=False),
    Dialect("text", token_prompts=False, token_ids=False, options=False, usage_option=False),
)


def _text(name: str, **more: Any) -> Dialect:
    return Dialect(name, token_prompts=False, sends_text=True, **more)


# For runs without a tokenizer: the answer has token ids, or the server counts the answer's tokens.
TEXT_DIALECTS = (
    _text("text prompts, return_token_ids", extra={"return_token_ids": True}),
    _text("text prompts, detokenize: false", extra={"detokenize": False}),
    _text("text", token_ids=False),
    _text("text, without options", token_ids=False, options=False),
    _text("text, without options or stream_options", token_ids=False, options=False, usage_option=False),
)
CHAT_DIALECTS = tuple(
    replace(one, name=one.name.replace("text prompts", "chat").replace("text", "chat"), path=CHAT)
    for one in TEXT_DIALECTS
    if "detokenize" not in one.extra
)
# Without `store`, a server keeps each response for later requests, and its memory grows.
RESPONSES_DIALECTS = (
    _text("responses", token_ids=False, usage_option=False, extra={"store": False}, path=RESPONSES),
)
MESSAGE_DIALECTS = {CHAT: CHAT_DIALECTS, RESPONSES: RESPONSES_DIALECTS}


def remedy_without_usage(path: str) -> str:
    """Return what a user can do if answers at `path` have neither token ids nor `usage`."""
    if path in MESSAGE_DIALECTS:  # a tokenizer here could not count reasoning and tool calls
        return "in answers to messages, the server must send usage"
    return "name the folder of the model's tokenizer with --model_path"


# OpenAI's chat endpoint deprecates `max_tokens`.
_MAX_TOKENS = {COMPLETIONS: "max_tokens", CHAT: "max_completion_tokens", RESPONSES: "max_output_tokens"}


@dataclass(frozen=True)
class Sampling:
    """Options of one answer. Defaults are not sent, except the temperature."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    cache_salt: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)  # fields that the user adds


def body(
    dialect: Dialect, model: str, prompt: str | Sequence[int], sampling: Sampling, stream: bool
) -> bytes:
    """Return the JSON of a request. Raises ValueError for an option that the dialect lacks."""
    request: dict[str, Any] = {"model": model, "temperature": sampling.temperature, **dialect.extra}
    request[_MAX_TOKENS[dialect.path]] = sampling.max_tokens
    if not dialect.sends_messages:
        request["prompt"] = prompt
    if stream:
        request["stream"] = True
        if dialect.usage_option:
            request["stream_options"] = {"include_usage": True}
    if sampling.temperature > 0:
        request["seed"] = sampling.seed
    if sampling.top_p < 1:
        request["top_p"] = sampling.top_p
    if sampling.stop:
        request["stop"] = list(sampling.stop)
    min_tokens, ignore_eos = sampling.min_tokens, sampling.ignore_eos
    if dialect.path == RESPONSES and min_tokens == sampling.max_tokens:
        min_tokens, ignore_eos = 0, ignore_eos or min_tokens > 1
    options = {
        "min_tokens": min_tokens if min_tokens > 1 else None,  # at least 1 in any case
        "top_k": sampling.top_k or None,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "ignore_eos": ignore_eos or None,
        "cache_salt": sampling.cache_salt or None,
    }
    for name, value in options.items():
        if value is None:
            continue
        if not dialect.options:
            raise ValueError(f"it has no {name}: it accepts only text and OpenAI's own options")
        if name == "min_tokens" and dialect.path == RESPONSES:
            raise ValueError(f"{RESPONSES} has no min_tokens: leave --min_output_len out")
        request[name] = value
    request |= sampling.extra
    text = json.dumps(request, separators=(",", ":"))
    return (f"{{{prompt}],{text[1:]}" if dialect.sends_messages else text).encode()
