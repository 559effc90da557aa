"""What servers count themselves, from their `/metrics`."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpillm.cores.openai_client.endpoint import Endpoint
from mpillm.cores.openai_client.http_connection import HttpError

_log = logging.getLogger(__name__)
_ASK_S = 5.0
MOST_S = 2 * _ASK_S
"""The longest that the two readings of a test take together."""


class Reading(NamedTuple):
    """What a server says of itself at one time; None: it does not say."""

    running: float | None = None  # requests
    waiting: float | None = None  # requests
    kv_cache_usage: float | None = None  # 0 to 1; of the engine with the fullest
    prompt_tokens: float | None = None  # since its start, as all that follow
    generated_tokens: float | None = None
    cached_tokens: float | None = None  # of prompts, that its own prefix cache gave
    accepted_guesses: float | None = None  # tokens
    preemptions: float | None = None
    transfers: float | None = None  # of KV caches from other servers
    failed_transfers: float | None = None
    received_tokens: float | None = None  # of prompts, that came in KV caches from other servers
    computed_tokens: float | None = None  # of prompts, that it computed itself
    expired_leases: float | None = None  # KV caches that it dropped before another server had read them
    late_reads: float | None = None  # of KV caches that it had dropped before


# Names that servers give these, in Prometheus' text format. Not among them is what a KV connector brings to a
# generation server (vllm:external_prefix_cache_hits_total).
_NAMES = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs", "mpillm:num_requests_running"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "mpillm:num_requests_waiting"),
    "kv_cache_usage": ("vllm:kv_cache_usage_perc", "sglang:token_usage", "mpillm:kv_cache_usage_perc"),
    "prompt_tokens": ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total", "mpillm:prompt_tokens_total"),
    "generated_tokens": (
        "vllm:generation_tokens_total",
        "sglang:generation_tokens_total",
        "mpillm:generation_tokens_total",
    ),
    "cached_tokens": (
        "vllm:prefix_cache_hits_total",
        "sglang:cached_tokens_total",
        "mpillm:prefix_cache_hits_total",
    ),
    "accepted_guesses": ("vllm:spec_decode_num_accepted_tokens_total",),
    "preemptions": ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total"),
    "transfers": ("vllm:nixl_xfer_time_seconds_count", "mpillm:kv_transfers_total"),
    "failed_transfers": (
        "vllm:nixl_num_failed_transfers_total",  # handshakes and notifications that failed, too
        "sglang:num_transfer_failed_reqs_total",
        "mpillm:kv_failed_transfers_total",
    ),
    "expired_leases": ("vllm:nixl_num_kv_expired_reqs_total",),
    "late_reads": ("vllm:nixl_num_notifications_after_expiry_total",),
    # Every connector of vLLM has these. The name ends with the label that matters.
    "received_tokens": ('vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}',),
    "computed_tokens": ('vllm:prompt_tokens_by_source_total{source="local_compute"}',),
}
_BY_SOURCE, _SOURCE = "vllm:prompt_tokens_by_source_total", re.compile(r'\bsource="\w*"')
_MEANINGS = {name: meaning for meaning, names in _NAMES.items() for name in names}
_COUNTS = Reading._fields[3:]
# What SGLang counts; each stands on its page from the first time that it grows, and is 0 until then.
_SGLANG = "sglang:"
_OF_SGLANG = {
    **{name: of for name, of in _MEANINGS.items() if name.startswith(_SGLANG) and name.endswith("_total")},
    "sglang:spec_verify_calls_total": "verified",
    "sglang:num_requests_total": "requests",
}
_MEANINGS |= _OF_SGLANG


def reading_of(text: str) -> Reading:
    """Return what a page in Prometheus' text format says: sums over all labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        # A label may hold spaces, and a time may follow the value.
        name, brace, rest = line.partition("{")
        if not brace:
            name, _, rest = line.partition(" ")
        elif name == _BY_SOURCE and (source := _SOURCE.search(rest)):
            name = f"{name}{{{source[0]}}}"
        if (meaning := _MEANINGS.get(name)) is None:
            continue
        words = (rest.rpartition("}")[2] if brace else rest).split()
        try:
            value = float(words[0])
        except (IndexError, ValueError):
            continue
        if math.isfinite(value):
            before = found.get(meaning, 0.0)
            found[meaning] = max(before, value) if meaning == "kv_cache_usage" else before + value
    if _SGLANG in text:
        found = _of_sglang(found)
    return finite(Reading(**found))


def _of_sglang(found: dict[str, float]) -> dict[str, float]:
    """Return it with the counts that are still 0, and guesses from what stands for them."""
    counts = dict.fromkeys(_OF_SGLANG.values(), 0.0) | found
    verified, requests = counts.pop("verified"), counts.pop("requests")
    # A prompt gives a token, and each verification one besides the guesses that it takes.
    guessed = counts["generated_tokens"] - requests - verified if verified else 0.0
    return counts | {"accepted_guesses": max(0.0, guessed)}


def of_iterations(text: str, before: Reading) -> Reading:
    """Return what TensorRT-LLM's statistics say: a JSON array of the iterations since they were read last.

    `before`: what they said then, which stands where there was none since.
    """
    try:
        rows = [row for row in json.loads(text) if isinstance(row, dict)]
    except (TypeError, ValueError, RecursionError):
        return before
    if not rows:
        return before._replace(running=0.0, waiting=0.0)
    last, cache = rows[-1], _part(rows[-1], "kvCacheStats")
    used, most = _number(cache, "usedNumBlocks"), _number(cache, "maxNumBlocks")
    reused, size = _number(cache, "reusedBlocks"), _number(cache, "tokensPerBlock")
    told = (_number(_part(row, "specDecodingStats"), "numAcceptedTokens") for row in rows)
    guessed = [n for n in told if n is not None]
    found = before._replace(
        running=_number(last, "numActiveRequests"),
        waiting=_number(last, "numQueuedRequests"),
        kv_cache_usage=used / most if used is not None and most else before.kv_cache_usage,
        cached_tokens=before.cached_tokens if reused is None or size is None else reused * size,
        accepted_guesses=(before.accepted_guesses or 0.0) + sum(guessed)
        if guessed
        else before.accepted_guesses,
    )
    return finite(found)


def finite(reading: Reading) -> Reading:
    """Return it without sums and shares that no float holds."""
    return Reading(*(value if value is None or math.isfinite(value) else None for value in reading))


def _part(row: dict[str, Any], name: str) -> dict[str, Any]:
    found = row.get(name)
    return found if isinstance(found, dict) else {}


def _number(row: dict[str, Any], name: str) -> float | None:
    value = row.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # hundreds of digits
        return None


async def metrics_page(endpoint: Endpoint) -> str:
    """Return a server's page of metrics; "" if it has none, or can't be asked."""
    try:
        status, _, reply = await endpoint.fetch("GET", "/metrics", _ASK_S)
    except HttpError as error:
        _log.info("%s/metrics: %s", endpoint.url, error)
        return ""
    return reply.decode("utf-8", "replace") if status == 200 else ""


async def read_one(endpoint: Endpoint) -> Reading:
    """Return what a server says; nothing of one that can't be asked."""
    text = await metrics_page(endpoint)
    if not text.lstrip().startswith("["):
        return reading_of(text)
    found = of_iterations(text, endpoint.said or Reading())
    endpoint.said = found
    return found


def grown(before: Sequence[Reading], after: Sequence[Reading]) -> dict[str, float]:
    """Return by how much each count has grown, over the servers that said so both times; those that none did
    are left out."""
    growth = {}
    for name in _COUNTS:
        pairs = [(getattr(a, name), getattr(b, name)) for a, b in zip(before, after, strict=True)]
        # A server that has been started again counts from 0.
        known = [b - a if b >= a else b for a, b in pairs if a is not None and b is not None]
        if known:
            growth[name] = sum(known)
    return growth
