"""Parameters of OpenAI's API, vLLM and TensorRT-LLM that have no implementation here.

The server rejects a request that sets one of them to a value with an effect.
`tests/unit/endpoint/test_parameters.py` has the names of vLLM's request classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpillm.endpoint.api_error import ApiError, Json
from mpillm.files import excerpt

# Names with the values that have no effect; null never has an effect. Any other value is rejected.
_BODY: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "prompt_logprobs": (),
    "logprob_token_ids": ([],),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "top_p_min": (0,),
    "logit_bias": ({},),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "repetition_detection": (),
    "watermarking": (False,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),  # no text has special tokens
    "detokenize": (True,),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "prompt_ignore_length": (0,),
    "prompt_embeds": (),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "modalities": (["text"],),
    "audio": (),
    "verbosity": (),
    "web_search_options": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "mm_payload": ("tensors",),
    "return_mm_kwargs": (True,),
    "chat_template": (),
    "chat_template_kwargs": ({},),  # this and the next two change the prompt of a chat
    "reasoning_effort": (),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "include_reasoning": (True,),  # the text of an answer contains the reasoning
    "thinking_token_budget": (-1,),
    "stream_interval": (1,),
    "return_token_offsets": (False,),
    "return_prompt_text": (False,),
    "return_context_logits": (False,),
    "routed_experts_prompt_start": (0,),
    "lora_request": (),
    "priority": (0,),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "vllm_xargs": ({},),
}
# With the choice "none" a model calls none of the functions: their list has no effect.
_CHOICE_OF = {"functions": "function_call"}
# In a chat's message.
_MESSAGE: dict[str, tuple[Any, ...]] = {
    "function_call": (),
    "tools": ([],),
    "task": ("",),
    "audio": (),
}
_WHY = {
    "tool_choice": "the model decides: no call can be forced",
    "disaggregated_params": "this server is not a context or generation server (--server_role)",
    "prompt_token_ids": "this server is not a context or generation server (--server_role)",
    "thinking_token_budget": "max_tokens limits the reasoning and the rest of an answer together",
    "truncation_side": "the server never truncates a prompt",
}


def check_body(body: Json) -> None:
    """Raise ApiError if a body sets a parameter that has no implementation here."""
    unused = {tools for tools, choice in _CHOICE_OF.items() if body.get(choice) == "none"}
    for name, value in body.items():
        if name in _BODY and name not in unused and not _has_no_effect(value, _BODY[name]):
            refuse(name, value)


def tools_of(body: Json, chat: bool) -> list[Any] | None:
    """Return the tools for the chat template; None with `tool_choice` none. Raises ApiError."""
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ApiError(400, f"tools {excerpt(tools)}: expected an array of objects", "tools")
    if tools and not chat:
        refuse("tools", tools)
    return None if body.get("tool_choice") == "none" else tools or None


def check_message(message: Mapping[str, Any]) -> None:
    """Raise ApiError if a chat's message has a part that has no implementation here."""
    for name, value in message.items():
        if name in _MESSAGE and not _has_no_effect(value, _MESSAGE[name]):
            raise ApiError(
                400, f"messages: {name} {excerpt(value)} is not supported; leave it out", "messages"
            )


def refuse(name: str, value: Any) -> None:
    """Raise the ApiError for a parameter that has no implementation here."""
    why = f": {_WHY[name]}" if name in _WHY else ""
    raise ApiError(400, f"{name} {excerpt(value)} is not supported{why}", name, "unsupported_parameter")


def _has_no_effect(value: Any, neutral: tuple[Any, ...]) -> bool:
    if value is None:
        return True
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)
