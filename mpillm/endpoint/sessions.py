"""The conversation of a request, for the policy `conversation`."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from mpillm.endpoint.api_error import Json
from mpillm.endpoint.body_values import mapping, text

SESSION_HEADERS = ("X-Session-ID", "X-Session-Affinity")
"""Headers with the conversation's name: MLCommons' and vLLM's clients send the first, AIPerf the second."""


def session_of(headers: Mapping[str, str], body: Json) -> int:
    """Return a number for the conversation; 0 if the request names none.

    The name is in one of the headers, in `session_id`, in `conversation_id` of `disaggregated_params` (as
    TensorRT-LLM's router reads it), or in `user`. Raises ApiError if it is not a string.
    """
    params = mapping(body, "disaggregated_params")
    named = {
        "session_id": body.get("session_id"),
        "disaggregated_params.conversation_id": params.get("conversation_id"),
        "user": body.get("user"),
    }
    names = [text(value, field) for field, value in named.items() if value is not None]
    in_headers = (headers.get(header, "") for header in SESSION_HEADERS)
    name = next(filter(None, (*in_headers, *names)), "")
    return (zlib.crc32(name.encode(errors="replace")) or 1) if name else 0
