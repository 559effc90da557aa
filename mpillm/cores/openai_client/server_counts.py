"""What servers count themselves, from their `/metrics`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Sequence

from mpillm.cores.openai_client.endpoint import Endpoint
from mpillm.cores.openai_client.http_connection import HttpError

_log = logging.getLogger(__name__)
_ASK_S = 5.0
MOST_S = 2 * _ASK_S
"""The longest that the two readings of a test take together."""
# Prompt tokens found in the server's own prefix cache; not what a KV connector brings to a generation server.
_CACHED = ("vllm:prefix_cache_hits_total", "sglang:cached_tokens_total")

Counts = Sequence[float | None]


def cached_tokens_of(text: str) -> float | None:
    """Return the prompt tokens that came from a cache, over all labels; None: the server does not say."""
    found = None
    for line in text.splitlines():
        # A label may hold spaces, and a time may follow the value.
        name, brace, rest = line.partition("{")
        values = (rest.rpartition("}")[2] if brace else line.partition(" ")[2]).split()
        if (name if brace else line.partition(" ")[0]) in _CACHED and values:
            with contextlib.suppress(ValueError):
                if math.isfinite(value := float(values[0])):
                    found = (found or 0.0) + value
    return found


async def cached_tokens(endpoints: Sequence[Endpoint]) -> Counts:
    """Return `cached_tokens_of` each server; None also of one that can't be asked."""
    return await asyncio.gather(*map(_cached_tokens, endpoints))


async def _cached_tokens(endpoint: Endpoint) -> float | None:
    try:
        status, _, reply = await endpoint.fetch("GET", "/metrics", _ASK_S)
    except HttpError as error:
        _log.info("%s/metrics: %s", endpoint.url, error)
        return None
    return cached_tokens_of(reply.decode("utf-8", "replace")) if status == 200 else None


def grown(before: Counts, after: Counts) -> float | None:
    """Return by how much counts have grown, over the servers that said so both times; None: none did."""
    # A server that has been started again counts from 0.
    pairs = zip(before, after, strict=True)
    known = [b - a if b >= a else b for a, b in pairs if a is not None and b is not None]
    return sum(known) if known else None
