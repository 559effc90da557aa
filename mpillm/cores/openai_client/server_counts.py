"""Servers' own counts, from their `/metrics`."""

from __future__ import annotations

import itertools
import json
import logging
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpillm.cores.draft_counts import accepted_at
from mpillm.cores.openai_client.endpoint import RemoteServer
from mpillm.cores.openai_client.http_connection import HttpError

_log = logging.getLogger(__name__)
_READ_S = 5.0
MAX_READ_S = 2 * _READ_S
"""The longest time for both readings of a test."""


class ServerCounts(NamedTuple):
    """A server's counts at one time; None: the server does not report this count."""

    running: float | None = None  # requests
    waiting: float | None = None  # requests
    kv_cache_usage: float | None = None  # 0 to 1; of the engine with the fullest cache
    prompt_tokens: float | None = None  # since the server's start, like all counts below
    generated_tokens: float | None = None
    cached_tokens: float | None = None  # of prompts, from its own prefix cache
    accepted_guesses: float | None = None  # tokens
    preemptions: float | None = None
    transfers: float | None = None  # of KV caches from other servers
    failed_transfers: float | None = None
    received_tokens: float | None = None  # of prompts, in KV caches from other servers
    computed_tokens: float | None = None  # of prompts, computed by this server
    expired_leases: float | None = None  # KV caches that it dropped before another server had read them
    late_reads: float | None = None  # reads of KV caches after it had dropped them
    drafted_tokens: float | None = None
    verifications: float | None = None  # steps of a request with draft tokens
    accepted_at: tuple[float, ...] = ()  # accepted draft tokens by position of the draft; () if not reported


# Servers' names of these counts, in Prometheus' text format. `cached_tokens` excludes tokens that a KV
# connector brings to a generation server (vllm:external_prefix_cache_hits_total).
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
    "drafted_tokens": ("vllm:spec_decode_num_draft_tokens_total",),
    "verifications": ("vllm:spec_decode_num_drafts_total", "sglang:spec_verify_calls_total"),
    "preemptions": ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total"),
    "transfers": (
        "vllm:nixl_xfer_time_seconds_count",
        "sglang:kv_transfer_latency_ms_count",  # only context servers have it
        "mpillm:kv_transfers_total",
    ),
    "failed_transfers": (
        "vllm:nixl_num_failed_transfers_total",  # also failed handshakes and notifications
        "sglang:num_transfer_failed_reqs_total",
        "sglang:num_bootstrap_failed_reqs_total",
        "mpillm:kv_failed_transfers_total",
    ),
    "expired_leases": ("vllm:nixl_num_kv_expired_reqs_total",),
    "late_reads": ("vllm:nixl_num_notifications_after_expiry_total",),
    # Every KV connector of vLLM has these two. The name includes the relevant label.
    "received_tokens": ('vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}',),
    "computed_tokens": ('vllm:prompt_tokens_by_source_total{source="local_compute"}',),
}
_BY_SOURCE, _SOURCE = "vllm:prompt_tokens_by_source_total", re.compile(r'\bsource="\w*"')
_MEANINGS = {name: meaning for meaning, names in _NAMES.items() for name in names}
_COUNTS = tuple(name for name in ServerCounts._fields[3:] if name != "accepted_at")
_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_POSITION = re.compile(r'\bposition="(\d{1,2})"')
# SGLang's counts. The server's page omits each of them while it is 0.
_SGLANG, _SGLANG_CONTEXT = "sglang:", 'engine_type="prefill"'
_SGLANG_COUNTS = {
    **{name: of for name, of in _MEANINGS.items() if name.startswith(_SGLANG) and name.endswith("_total")},
    "sglang:num_requests_total": "requests",
}
_MEANINGS |= _SGLANG_COUNTS


def reading_of(text: str) -> ServerCounts:
    """Return the counts of a page in Prometheus' text format: sums over all labels."""
    counts: dict[str, float] = {}
    by_position: dict[int, float] = {}
    for line in text.split("\n"):
        # A label may hold spaces, and a time may follow the value.
        name, brace, labels = line.partition("{")
        if not brace:
            name, _, labels = line.partition(" ")
        elif name == _BY_SOURCE and (source := _SOURCE.search(labels)):
            name = f"{name}{{{source[0]}}}"
        position = _POSITION.search(labels) if name == _BY_POSITION else None
        if (meaning := _MEANINGS.get(name)) is None and position is None:
            continue
        value_texts = (labels.rpartition("}")[2] if brace else labels).split()
        try:
            value = float(value_texts[0])
        except (IndexError, ValueError):
            continue
        if position is not None and math.isfinite(value):
            at = int(position[1])
            by_position[at] = by_position.get(at, 0.0) + value
        elif meaning is not None and math.isfinite(value):
            before = counts.get(meaning, 0.0)
            counts[meaning] = max(before, value) if meaning == "kv_cache_usage" else before + value
    if _SGLANG in text:
        counts = _sglang_counts(counts, is_context=_SGLANG_CONTEXT in text)
    positions = tuple(by_position.get(at, 0.0) for at in range(max(by_position, default=-1) + 1))
    return finite(ServerCounts(**counts, accepted_at=positions))


def _sglang_counts(counts: dict[str, float], is_context: bool) -> dict[str, float]:
    """Return the counts with the missing zeros. Accepted draft tokens are derived from other counts."""
    all_counts = dict.fromkeys(_SGLANG_COUNTS.values(), 0.0) | counts
    if is_context:  # only these servers count transfers
        all_counts.setdefault("transfers", 0.0)
    verified, requests = all_counts["verifications"], all_counts.pop("requests")
    # Each prompt yields one token. Each verification yields the accepted draft tokens and one more.
    accepted = all_counts["generated_tokens"] - requests - verified if verified else 0.0
    return all_counts | {"accepted_guesses": max(0.0, accepted)}


def of_iterations(text: str, before: ServerCounts) -> ServerCounts:
    """Return the counts of TensorRT-LLM's statistics: a JSON array of the iterations since the last reading.

    `before`: the last reading, for counts without a new value.
    """
    try:
        rows = [row for row in json.loads(text) if isinstance(row, dict)]
    except (TypeError, ValueError, RecursionError):
        return before
    if not rows:
        return before._replace(running=0.0, waiting=0.0)
    last, cache = rows[-1], _part(rows[-1], "kvCacheStats")
    used, n_blocks = _number(cache, "usedNumBlocks"), _number(cache, "maxNumBlocks")
    reused, size = _number(cache, "reusedBlocks"), _number(cache, "tokensPerBlock")
    drafts: dict[str, Any] = {
        meaning: _total(before, meaning, [_part(row, "specDecodingStats") for row in rows], name)
        for meaning, name in _SPEC_DECODING_STATS.items()
    }
    counts = before._replace(
        running=_number(last, "numActiveRequests"),
        waiting=_number(last, "numQueuedRequests"),
        kv_cache_usage=used / n_blocks if used is not None and n_blocks else before.kv_cache_usage,
        cached_tokens=before.cached_tokens if reused is None or size is None else reused * size,
        **drafts,
    )
    return finite(counts)


# TensorRT-LLM's names, per iteration.
_SPEC_DECODING_STATS = {
    "accepted_guesses": "numAcceptedTokens",
    "drafted_tokens": "numDraftTokens",
    "verifications": "numRequestsWithDraftTokens",
}


def _total(before: ServerCounts, meaning: str, rows: list[dict[str, Any]], name: str) -> float | None:
    """Return a count of the last reading, plus its numbers in later iterations."""
    numbers = [number for row in rows if (number := _number(row, name)) is not None]
    last: float | None = getattr(before, meaning)
    return (last or 0.0) + sum(numbers) if numbers else last


def finite(reading: ServerCounts) -> ServerCounts:
    """Return the counts without values that a float cannot hold."""
    changed: dict[str, Any] = {
        name: None
        for name, value in reading._asdict().items()
        if isinstance(value, float) and not math.isfinite(value)
    }
    if not all(map(math.isfinite, reading.accepted_at)):
        changed["accepted_at"] = ()
    return reading._replace(**changed)


def _part(row: dict[str, Any], name: str) -> dict[str, Any]:
    part = row.get(name)
    return part if isinstance(part, dict) else {}


def _number(row: dict[str, Any], name: str) -> float | None:
    value = row.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # hundreds of digits
        return None


async def metrics_page(endpoint: RemoteServer) -> str:
    """Return a server's page of metrics; "" if it has none, or is unreachable."""
    try:
        status, _, reply = await endpoint.fetch("GET", "/metrics", _READ_S)
    except HttpError as error:
        _log.info("%s/metrics: %s", endpoint.url, error)
        return ""
    return reply.decode("utf-8", "replace") if status == 200 else ""


async def read_one(endpoint: RemoteServer) -> ServerCounts:
    """Return a server's counts; none if it is unreachable."""
    text = await metrics_page(endpoint)
    if not text.lstrip().startswith("["):
        return reading_of(text)
    counts = of_iterations(text, endpoint.last_statistics or ServerCounts())
    endpoint.last_statistics = counts
    return counts


def grown(before: Sequence[ServerCounts], after: Sequence[ServerCounts]) -> dict[str, float]:
    """Return the growth of each count, summed over the servers that reported the count both times.

    Counts without such a server are left out.
    """
    growth = {}
    for name in _COUNTS:
        pairs = [(getattr(a, name), getattr(b, name)) for a, b in zip(before, after, strict=True)]
        # A restarted server counts from 0.
        known = [b - a if b >= a else b for a, b in pairs if a is not None and b is not None]
        if known:
            growth[name] = sum(known)
    for a, b in zip(before, after, strict=True):
        for position, (old, new) in enumerate(
            itertools.zip_longest(a.accepted_at, b.accepted_at, fillvalue=0.0)
        ):
            name = accepted_at(position)
            growth[name] = growth.get(name, 0.0) + (new - old if new >= old else new)
    return growth
