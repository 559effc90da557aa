"""Fields of a row that are for its request only: sampling options, and other fields of a request's body.

Sampling options are part of every request, whatever the core. Other fields, such as `response_format`, can
only be sent to a server. They travel with the prompt, before its bytes: a byte that UTF-8 does not have, the
fields as JSON, and that byte again.
"""

from __future__ import annotations

import enum
import json
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpillm.files import excerpt
from mpillm.options.parsers import SET_FIELDS

# Keys of the output length: vLLM, GuideLLM, Mooncake, OpenAI
LENGTHS = (
    *("output_tokens", "output_tokens_count", "output_length", "output_len"),
    *("max_completion_tokens", "max_tokens"),
)
_SET = SET_FIELDS.union(LENGTHS)  # or read as lengths
# Fields of rows that are not the complete body of a request. Other names may be a data set's own columns.
_FIELDS = (
    *("response_format", "tool_choice", "parallel_tool_calls", "reasoning_effort", "chat_template_kwargs"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_p", "logit_bias", "logprobs"),
    *("top_logprobs", "stop", "stop_token_ids", "bad_words", "structured_outputs"),
)
_EXTRA = ("extra", "extra_body")  # fields of the body, in AIPerf's rows
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {  # values that change nothing on any core
    "response_format": ({"type": "text"},), "tool_choice": ("auto",), "parallel_tool_calls": (True,),
    "repetition_penalty": (1,), "frequency_penalty": (0,), "presence_penalty": (0,), "min_p": (0,),
    "logprobs": (False, 0), "top_logprobs": (0,), "logit_bias": ({},), "stop": ([], ""),
    "stop_token_ids": ([],),
}  # fmt: skip
# Labels of a request, which do not change its answer
_LABELS = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
# By name: the column of a request, the lowest and the highest value
_SAMPLING: Mapping[str, tuple[str, float, float]] = {
    "temperature": ("temperature", 0, 100),
    "top_p": ("top_p", 1e-9, 1),
    "top_k": ("top_k", -1, (1 << 31) - 1),
    "seed": ("seed", 0, (1 << 32) - 1),
    "min_tokens": ("min_output", 0, (1 << 31) - 1),
}
_NUMBERS = ("temperature", "top_p")  # others are whole numbers
_IGNORE_EOS = "ignore_eos"
_MARK = b"\xff"
_MAX_BYTES = 1 << 20  # of a row's fields as JSON


class FieldUse(enum.Enum):
    """Which fields of rows have an effect. Others, except with UNUSED, are errors."""

    UNUSED = "unused"
    SAMPLING = "sampling"
    ALL = "all"


class OwnFields(NamedTuple):
    """Fields for one request."""

    sampling: Mapping[str, float] = {}  # by column of the request; see `comms.messages.REQUEST`
    body: Mapping[str, Any] = {}  # for a server
    names: frozenset[str] = frozenset()  # in the row
    unused: frozenset[str] = frozenset()  # names without effect


NO_FIELDS = OwnFields()


def own_fields(row: Mapping[str, Any], use: FieldUse, is_body: bool = False) -> OwnFields:
    """Return the fields of a row. `is_body`: it is the complete body of a request.

    Raises ValueError that names a field with a wrong value, or one that cannot be sent.
    """
    names = [key for key in row if key not in _SET] if is_body else [*_FIELDS, *_SAMPLING, _IGNORE_EOS]
    fields = {key: row[key] for key in names if row.get(key) not in (None, "") and key not in _EXTRA}
    fields |= _extra(row)
    if use is FieldUse.UNUSED:
        unused = frozenset(fields).union(["n"] if "n" in row else ())
        return OwnFields(unused=unused) if unused else NO_FIELDS
    if row.get("n") not in (None, 1, "1", ""):
        raise ValueError(f"n is {excerpt(row['n'])}; must be 1: a request has one answer")
    if not fields:
        return NO_FIELDS
    sampling = {_SAMPLING[key][0]: _number(fields, key) for key in _SAMPLING if key in fields}
    sampling = {column: max(value, 0) for column, value in sampling.items()}  # vLLM's top_k has -1 for none
    if _IGNORE_EOS in fields and _flag(fields, _IGNORE_EOS):
        sampling["min_output"] = math.inf  # up to the output length
    body = {key: value for key, value in fields.items() if key not in _SAMPLING and key != _IGNORE_EOS}
    unused = frozenset[str]()
    if use is FieldUse.SAMPLING:
        unused = frozenset(body)
        for key, value in body.items():
            if key not in _LABELS and value not in _NEUTRAL.get(key, ()):
                raise ValueError(
                    f"{key} is {excerpt(value)}; only a server can follow it: remove it, or send the messages"
                    " or texts of the rows (--endpoint_type chat, or --url without --model_path)"
                )
        body = {}
    _check_size(body)
    return OwnFields(sampling, body, frozenset(fields) - unused, unused)


def _extra(row: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key in _EXTRA:
        extra = row.get(key)
        if extra in (None, ""):
            continue
        if not isinstance(extra, dict) or not all(isinstance(name, str) for name in extra):
            raise ValueError(f"{key} is {excerpt(extra)}; must be an object, with fields of the request")
        if own := sorted(_SET.intersection(extra)):
            raise ValueError(f"{key} has {own[0]}, which mpillm sets; give the row's own key")
        fields |= {name: value for name, value in extra.items() if value is not None}
    return fields


def _number(fields: Mapping[str, Any], key: str) -> float:
    _, low, high = _SAMPLING[key]
    value, kind = fields[key], "a number" if key in _NUMBERS else "a whole number"
    try:
        number = float(value) if type(value) in (int, float, str) else math.nan  # CSV has only text
    except (ValueError, OverflowError):
        number = math.nan
    if not low <= number <= high or (key not in _NUMBERS and not number.is_integer()):
        raise ValueError(f"{key} is {excerpt(value)}; must be {kind} from {low:.12g} to {high:.12g}")
    return number


def _flag(fields: Mapping[str, Any], key: str) -> bool:
    value = fields[key]
    flags = {"true": True, "false": False}
    if not isinstance(value, bool) and str(value).lower() not in flags:
        raise ValueError(f"{key} is {excerpt(value)}; must be true or false")
    return value if isinstance(value, bool) else flags[str(value).lower()]


def _check_size(body: Mapping[str, Any]) -> None:
    try:
        size = len(_json(body))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{', '.join(sorted(body))}: not JSON: {error}") from None
    if size > _MAX_BYTES:
        raise ValueError(f"{', '.join(sorted(body))}: {size} bytes as JSON; at most {_MAX_BYTES}")


def _json(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()  # ASCII


def with_fields(tokens: array[int], body: Mapping[str, Any]) -> array[int]:
    """Return a prompt of bytes, with the fields of its request before it."""
    return array("i", [*_MARK, *_json(body), *_MARK]) + tokens if body else tokens


def split_fields(prompt: bytes) -> tuple[Mapping[str, Any], bytes]:
    """Return the fields and the prompt in a prompt of `with_fields`."""
    if not prompt.startswith(_MARK):
        return {}, prompt
    text, _, plain = prompt[1:].partition(_MARK)
    body: dict[str, Any] = json.loads(text)
    return body, plain


def sampling_columns(each: Sequence[OwnFields]) -> dict[str, NDArray[np.float64]]:
    """Return the sampling options of requests by column, shape [requests]; NaN: the run's option."""
    columns = sorted({column for own in each for column in own.sampling})
    return {column: np.array([own.sampling.get(column, np.nan) for own in each]) for column in columns}


def own_note(each: Iterable[OwnFields]) -> str:
    """Return a note for the user about fields that rows set for their requests; "" if there are none."""
    names = sorted(frozenset[str]().union(*(own.names for own in each)))
    return f"its rows set {', '.join(names)} for their own requests" if names else ""
