"""What a request to the `tensorrt_llm` model asks for, and what it asks for that the engine has not.

Tensors have the names, types and shapes of TensorRT-LLM's model. A value that asks for nothing (a penalty of
1, a beam width of 1) is taken; one that would change the answer and can't be done is refused by name.
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
"""The inputs of one request of a batch, by name, without the dimension of the batch."""

# Values that ask for nothing. Other inputs of the model's table that are not read below must be empty.
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
# Answers do not depend on these: ids for padding, what to keep in a cache.
_PASSED_OVER = frozenset(
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
# What `RequestExtras` is made from, with the value that asks for nothing.
_SPECIAL: dict[str, float] = {
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "return_context_logits": 0,
    "return_generation_logits": 0,
    "beam_width": 1,
}
NO_END = -1  # as an `end_id`: no token ends the answer
OWN_END = -2  # the model's own end tokens do, as without an `end_id`: for an ensemble, which must give one


# A tritonserver made for NumPy 1 does not fail with NumPy 2: its tensors have wrong contents.
_OTHER_NUMPY = (
    ""
    if np.lib.NumpyVersion(np.__version__) < "2.0.0"
    else f" (if the request says otherwise: NumPy {np.__version__} does not fit this server, one below 2 may)"
)


class Refused(Exception):
    """A request that can't be answered, with the input that it is about."""


@dataclass(frozen=True)
class Asked:
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
    num_input_tokens: bool = False  # to be answered, too
    num_output_tokens: bool = False
    log_probs: bool = False
    special: RequestExtras | None = None


FindAdapter = Callable[[int, NDArray[Any] | None, NDArray[Any] | None], Adapter]
"""From a task id, weights and config of LoRA to the adapter; id 0: of this request alone. Raises Refused."""


def read(
    tensors: Tensors,
    exclude_input: bool,
    *,
    takes_special: bool = True,
    max_beam_width: int = 4,
    find_adapter: FindAdapter | None = None,
) -> Asked:
    """Return what one prompt asks for. `exclude_input`: unless the request says it. Raises Refused.

    `takes_special`: whether the engine does (see `TakesSpecial`); `find_adapter`: None if no adapters.
    """
    _refuse(tensors)

    def number(name: str, convert: Callable[[Any], Any], default: Any) -> Any:
        value = tensors.get(name)
        return default if value is None or value.size == 0 else convert(value.reshape(-1)[0])

    ids = tensors.get("input_ids")
    if ids is None or not ids.size:
        raise Refused(f"input_ids: it is missing or empty{_OTHER_NUMPY}")
    length = number("input_lengths", int, ids.size)
    if length > ids.size:
        raise Refused(f"input_lengths {length}: there are {ids.size} input_ids{_OTHER_NUMPY}")
    prompt = ids.reshape(-1)[:length].tolist()
    max_output = number("request_output_len", int, 0)
    if not prompt:
        raise Refused(f"input_lengths: must be at least 1{_OTHER_NUMPY}")
    if max_output < 1:
        raise Refused(f"request_output_len {max_output}: must be at least 1{_OTHER_NUMPY}")
    top_k, top_p = number("runtime_top_k", int, None), number("runtime_top_p", float, 1.0)
    temperature = number("temperature", float, 1.0)
    if top_k is None and not 0 < top_p < 1:
        top_k = 1  # TensorRT-LLM is greedy where a request says neither
    greedy = top_k == 1 or temperature == 0
    end_id = number("end_id", int, OWN_END)
    n_before_end = number("min_tokens", int, 0)
    special, because = _special(tensors, temperature or 1.0)
    if special is not None and not takes_special:
        raise Refused(f"{because}: the embedded engine has it only without pipeline parallelism")
    task_id = number("lora_task_id", int, 0)
    if task_id or _is_there(tensors, "lora_weights"):
        if find_adapter is None:
            name = "lora_task_id" if task_id else "lora_weights"
            raise Refused(f"{name}: the embedded engine has it only on CPUs, so far")
        special = special or RequestExtras()
        special.adapter = find_adapter(task_id, tensors.get("lora_weights"), tensors.get("lora_config"))
    if n_before_end and end_id >= 0 and takes_special:
        special = special or RequestExtras()
        special.not_yet = (end_id,)
    if special is not None and special.beam_width > 1:
        if special.beam_width > max_beam_width:
            raise Refused(f"beam_width {special.beam_width}: the model's max_beam_width is {max_beam_width}")
        _check_beams(tensors, temperature, greedy=greedy)
        special.length_penalty = number("len_penalty", float, special.length_penalty)
        special.early_stopping = number("early_stopping", bool, special.early_stopping)
        special.ends = None if end_id == OWN_END else (end_id,) if end_id >= 0 else ()
    return Asked(
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
        special,
    )


def _special(tensors: Tensors, temperature: float) -> tuple[RequestExtras | None, str]:
    """What a prompt asks for that few do, and an input that asks for it. Refused."""
    said = {name: float(tensors[name].reshape(-1)[0]) for name in _SPECIAL if _is_there(tensors, name)}
    words = word_list(tensors.get("bad_words_list"))
    bias = tensors.get("embedding_bias")
    names = [name for name, value in said.items() if value != _SPECIAL[name]]
    names += ["bad_words_list"] * bool(words)
    names += ["embedding_bias"] * (bias is not None and bool(np.any(bias)))
    if not names:
        return None, ""
    if (penalty := said.get("repetition_penalty", 1.0)) <= 0:
        raise Refused(f"repetition_penalty {penalty:g}: must be above 0")
    # Presence and frequency count after the division by the temperature.
    return RequestExtras(
        bias.reshape(-1).astype(np.float32) if bias is not None and "embedding_bias" in names else None,
        penalty,
        said.get("presence_penalty", 0.0) * temperature,
        said.get("frequency_penalty", 0.0) * temperature,
        words,
        keeps_context_logits=bool(said.get("return_context_logits")),
        keeps_generation_logits=bool(said.get("return_generation_logits")),
        beam_width=max(1, int(said.get("beam_width", 1))),
    ), names[0]


def _check_beams(tensors: Tensors, temperature: float, *, greedy: bool) -> None:
    """Refused: what beams can't have here."""
    for name in ("streaming", "return_generation_logits"):
        if _is_there(tensors, name) and tensors[name].reshape(-1)[0]:
            raise Refused(f"{name}: not with a beam_width above 1")
    if word_list(tensors.get("stop_words_list")):
        raise Refused("stop_words_list: not with a beam_width above 1")
    if not greedy or temperature not in (0, 1):
        name = (
            "temperature"
            if greedy
            else "runtime_top_k"
            if _is_there(tensors, "runtime_top_k")
            else "runtime_top_p"
        )
        raise Refused(f"{name}: not with a beam_width above 1, which takes the likeliest")


def _is_there(tensors: Tensors, name: str) -> bool:
    return name in tensors and tensors[name].size > 0


def _refuse(tensors: Tensors) -> None:
    for name, value in tensors.items():
        if name in _READ or name in _SPECIAL or name in _PASSED_OVER or not value.size:
            continue
        if name in _NEUTRAL and float(value.reshape(-1)[0]) in _NEUTRAL[name]:
            continue
        raise Refused(f"{name}: the embedded engine has no such thing; leave it out")


def word_list(value: NDArray[Any] | None) -> tuple[tuple[int, ...], ...]:
    """Return the words of a list in TensorRT-LLM's form, shape [2, n]: tokens back to back; ends, then -1.

    Raises Refused.

    [[7, 8, 9, 0], [1, 3, -1, -1]] are the words (7,) and (8, 9).
    """
    if value is None or not value.size:
        return ()
    if value.ndim != 2 or len(value) != 2:
        raise Refused(f"a list of words has the shape {list(value.shape)}: expected [2, n]")
    tokens, ends = value.tolist()
    words, start = [], 0
    for end in ends:
        if end == -1 or end == start:
            continue
        if not start < end <= len(tokens):
            raise Refused(f"a list of words ends one at {end}, of {len(tokens)} tokens, after {start}")
        words.append(tuple(tokens[start:end]))
        start = end
    return tuple(words)
