"""Parse requests to the `tensorrt_llm` model, and reject inputs that the embedded engine does not support.

Tensors have the names, types and shapes of TensorRT-LLM's model. A value without effect (a penalty of 1, a
beam width of 1) is accepted. A value that would change the output, but is not supported, is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpillm.engine.extras.lora import Adapter
from mpillm.engine.extras.request_extras import RequestExtras

Tensors = Mapping[str, NDArray[Any]]
"""The inputs of one request of a batch, by name, without the batch dimension."""

# Values without effect. Other inputs that are not listed below must be empty.
_NEUTRAL: dict[str, tuple[float, ...]] = {
    "num_return_sequences": (0, 1),
    "runtime_top_p_min": (0,),
    "runtime_top_p_decay": (0, 1),
    "runtime_top_p_reset_ids": (-1, 0),
    "beam_search_diversity_rate": (0,),
    "return_perf_metrics": (0,),
    "prompt_vocab_size": (0,),
    "decoder_input_lengths": (0, 1),
}
# The output does not depend on these: padding ids, cache retention.
_IGNORED = frozenset(
    {
        "pad_id",
        "decoder_input_ids",
        "retention_token_range_starts",
        "retention_token_range_ends",
        "retention_token_range_priorities",
        "retention_token_range_durations_ms",
        "retention_decode_priority",
        "retention_decode_duration_ms",
    }
)
_READ = frozenset(
    {
        "input_ids",
        "input_lengths",
        "request_output_len",
        "end_id",
        "stop_words_list",
        "bad_words_list",
        "embedding_bias",
        "temperature",
        "runtime_top_k",
        "runtime_top_p",
        "min_tokens",
        "seed",
        "return_num_input_tokens",
        "return_num_output_tokens",
        "exclude_input_in_output",
        "return_log_probs",
        "lora_task_id",
        "lora_weights",
        "lora_config",
        "len_penalty",
        "early_stopping",
        "stop",
        "streaming",
    }
)
# Inputs of `RequestExtras`, with the value that has no effect.
_SPECIAL: dict[str, float] = {
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "return_context_logits": 0,
    "return_generation_logits": 0,
    "beam_width": 1,
}
_MAX_COUNT = 2**31 - 1
_MAX_FLOAT = float(np.finfo(np.float32).max)
_MAX_LEN_PENALTY = 30.0  # a beam search computes length ** len_penalty, which must not overflow
NO_END = -1  # `end_id` if no token ends the output
OWN_END = -2  # `end_id` for the model's own end tokens, which are also the default; an ensemble must send one


# With NumPy 2, a tritonserver built for NumPy 1 does not fail: its tensors have wrong contents.
_OTHER_NUMPY = (
    ""
    if np.lib.NumpyVersion(np.__version__) < "2.0.0"
    else f" (if the request has it: this server does not support NumPy {np.__version__}; install numpy<2)"
)


class RequestError(Exception):
    """Error of a request; the message names the input."""


@dataclass(frozen=True)
class PromptRequest:
    """One prompt of a request."""

    prompt: list[int]
    max_output: int
    min_output: int = 0
    end_id: int | None = None  # None: the model's own end tokens
    stop_words: tuple[tuple[int, ...], ...] = ()
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    streaming: bool = False
    exclude_input: bool = False
    num_input_tokens: bool = False  # include it in the response
    num_output_tokens: bool = False
    log_probs: bool = False
    extras: RequestExtras | None = None


FindAdapter = Callable[[int, NDArray[Any] | None, NDArray[Any] | None], Adapter]
"""Returns the adapter of a LoRA task id, weights and config. Id 0: for this request. Raises RequestError."""


def read(
    tensors: Tensors,
    exclude_input: bool,
    *,
    takes_extras: bool = True,
    max_beam_width: int = 4,
    find_adapter: FindAdapter | None = None,
) -> PromptRequest:
    """Parse the inputs of one prompt. Raises RequestError.

    Args:
        exclude_input: Default of the input `exclude_input_in_output`.
        takes_extras: Whether the engine accepts extras (see `TakesExtras`).
        find_adapter: None if the engine does not accept adapters.
    """
    _check_supported(tensors)

    def number(name: str, convert: Callable[[Any], Any], default: Any) -> Any:
        value = tensors.get(name)
        return default if value is None or value.size == 0 else convert(value.reshape(-1)[0])

    def number_in(name: str, low: float, high: float, default: float) -> float:
        return _in_range(name, number(name, float, default), low, high)

    ids = tensors.get("input_ids")
    if ids is None or not ids.size:
        raise RequestError(f"input_ids: it is missing or empty{_OTHER_NUMPY}")
    length = number("input_lengths", int, ids.size)
    if length > ids.size:
        raise RequestError(f"input_lengths {length}: there are {ids.size} input_ids{_OTHER_NUMPY}")
    prompt = ids.reshape(-1)[:length].tolist()
    max_output = number("request_output_len", int, 0)
    if length < 1:
        raise RequestError(f"input_lengths: must be at least 1{_OTHER_NUMPY}")
    if max_output < 1:
        raise RequestError(f"request_output_len {max_output}: must be at least 1{_OTHER_NUMPY}")
    _in_range("request_output_len", max_output, 1, _MAX_COUNT)
    top_k, top_p = number("runtime_top_k", int, None), number("runtime_top_p", float, 1.0)
    temperature = number_in("temperature", 0, _MAX_FLOAT, 1.0)
    if top_k is None and not 0 < top_p < 1:
        top_k = 1  # without either, TensorRT-LLM is greedy
    greedy = top_k == 1 or temperature == 0
    end_id = number("end_id", int, OWN_END)
    n_before_end = int(number_in("min_tokens", 0, _MAX_COUNT, 0))
    extras, because = _request_extras(tensors, temperature or 1.0)
    if extras is not None and not takes_extras:
        raise RequestError(f"{because}: the embedded engine has it only without pipeline parallelism")
    task_id = number("lora_task_id", int, 0)
    if task_id or _has_value(tensors, "lora_weights"):
        if find_adapter is None:
            name = "lora_task_id" if task_id else "lora_weights"
            raise RequestError(f"{name}: the embedded engine has it only on CPUs, so far")
        extras = extras or RequestExtras()
        extras.adapter = find_adapter(task_id, tensors.get("lora_weights"), tensors.get("lora_config"))
    if n_before_end and end_id >= 0 and takes_extras:
        extras = extras or RequestExtras()
        extras.not_yet = (end_id,)
    if extras is not None and extras.beam_width > 1:
        if extras.beam_width > max_beam_width:
            raise RequestError(
                f"beam_width {extras.beam_width}: the model's max_beam_width is {max_beam_width}"
            )
        _check_beams(tensors, temperature, greedy=greedy)
        limit = _MAX_LEN_PENALTY
        extras.length_penalty = number_in("len_penalty", -limit, limit, extras.length_penalty)
        extras.early_stopping = number("early_stopping", bool, extras.early_stopping)
        extras.ends = None if end_id == OWN_END else (end_id,) if end_id >= 0 else ()
    return PromptRequest(
        prompt,
        max_output,
        n_before_end,
        None if end_id == OWN_END else end_id,
        word_list(tensors.get("stop_words_list")),
        0.0 if greedy else temperature,
        0 if greedy else max(0, top_k or 0),
        1.0 if greedy or not 0 < top_p < 1 else top_p,
        number("seed", int, 0) & 0xFFFFFFFF,
        number("streaming", bool, False),
        number("exclude_input_in_output", bool, exclude_input),
        number("return_num_input_tokens", bool, False),
        number("return_num_output_tokens", bool, False),
        number("return_log_probs", bool, False),
        extras,
    )


def _request_extras(tensors: Tensors, temperature: float) -> tuple[RequestExtras | None, str]:
    """Return a prompt's extras, and the name of an input that needs them. Raises RequestError."""
    values = {name: float(tensors[name].reshape(-1)[0]) for name in _SPECIAL if _has_value(tensors, name)}
    bad_words = word_list(tensors.get("bad_words_list"))
    bias = tensors.get("embedding_bias")
    names = [name for name, value in values.items() if value != _SPECIAL[name]]
    names += ["bad_words_list"] * bool(bad_words)
    names += ["embedding_bias"] * (bias is not None and bool(np.any(bias)))
    if not names:
        return None, ""
    if (penalty := values.get("repetition_penalty", 1.0)) <= 0:
        raise RequestError(f"repetition_penalty {penalty:g}: must be above 0")
    for name, value in values.items():
        _in_range(name, value, -_MAX_FLOAT, _MAX_FLOAT)
    if bias is not None and not np.all(bias < np.inf):
        raise RequestError("embedding_bias: must be numbers below infinity")
    # The engine applies these penalties before it divides by the temperature, TensorRT-LLM after it.
    return RequestExtras(
        bias.reshape(-1).astype(np.float32) if bias is not None and "embedding_bias" in names else None,
        penalty,
        values.get("presence_penalty", 0.0) * temperature,
        values.get("frequency_penalty", 0.0) * temperature,
        bad_words,
        keeps_context_logits=bool(values.get("return_context_logits")),
        keeps_generation_logits=bool(values.get("return_generation_logits")),
        beam_width=max(1, int(values.get("beam_width", 1))),
    ), names[0]


def _in_range(name: str, value: float, low: float, high: float) -> float:
    if not low <= value <= high:  # also if it is not a number
        raise RequestError(f"{name} {value:g}: must be from {low:g} to {high:g}")
    return value


def _check_beams(tensors: Tensors, temperature: float, *, greedy: bool) -> None:
    """Raise RequestError for inputs that beam search does not support."""
    for name in ("streaming", "return_generation_logits"):
        if _has_value(tensors, name) and tensors[name].reshape(-1)[0]:
            raise RequestError(f"{name}: not with a beam_width above 1")
    if word_list(tensors.get("stop_words_list")):
        raise RequestError("stop_words_list: not with a beam_width above 1")
    if not greedy or temperature not in (0, 1):
        name = (
            "temperature"
            if greedy
            else "runtime_top_k"
            if _has_value(tensors, "runtime_top_k")
            else "runtime_top_p"
        )
        raise RequestError(f"{name}: not with a beam_width above 1, which takes the likeliest")


def _has_value(tensors: Tensors, name: str) -> bool:
    return name in tensors and tensors[name].size > 0


def _check_supported(tensors: Tensors) -> None:
    for name, value in tensors.items():
        if name in _READ or name in _SPECIAL or name in _IGNORED or not value.size:
            continue
        if name in _NEUTRAL and float(value.reshape(-1)[0]) in _NEUTRAL[name]:
            continue
        raise RequestError(f"{name}: the embedded engine has no such thing; leave it out")


def word_list(value: NDArray[Any] | None) -> tuple[tuple[int, ...], ...]:
    """Parse a word list in TensorRT-LLM's form, shape [2, n]: concatenated tokens; ends, padded with -1.

    [[7, 8, 9, 0], [1, 3, -1, -1]] are the words (7,) and (8, 9). Raises RequestError.
    """
    if value is None or not value.size:
        return ()
    if value.ndim != 2 or len(value) != 2:
        raise RequestError(f"a list of words has the shape {list(value.shape)}: expected [2, n]")
    tokens, ends = value.tolist()
    sequences, start = [], 0
    for end in ends:
        if end == -1 or end == start:
            continue
        if not start < end <= len(tokens):
            raise RequestError(f"a list of words ends one at {end}, of {len(tokens)} tokens, after {start}")
        sequences.append(tuple(tokens[start:end]))
        start = end
    return tuple(sequences)
