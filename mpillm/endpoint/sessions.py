"""The conversation of a request, for the policy `conversation`."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from mpillm.endpoint.api_error import Json
from mpillm.endpoint.body_values import mapping, text

SESSION_HEADER = "X-Session-ID"


def session_of(headers: Mapping[str, str], body: Json) -> int:
    """Return a number for the conversation; 0 if the request names none.

    The name is in the header, in `session_id`, in `conversation_id` of `disaggregated_params` (as
    TensorRT-LLM's router reads it), or in `user`. Raises ApiError if it is not a string.
    """
    params = mapping(body, "disaggregated_params")
    named = {
        "session_id": body.get("session_id"),
        "disaggregated_params.conversation_id": params.get("conversation_id"),
        "user": body.get("user"),
    }
    names = [text(value, field) for field, value in named.items() if value is not None]
    name = headers.get(SESSION_HEADER) or next(filter(None, names), "")
    return (zlib.crc32(name.encode(errors="replace")) or 1) if name else 0
