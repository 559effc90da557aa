"""What a tritonserver says of itself at its port of metrics, and what TensorRT-LLM behind it does.

Source: custom_metrics_reporter.cc of TensorRT-LLM's backend. Requests and blocks are those of each model's
last step; tokens and reused blocks are counted since the server's start.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict

from mpillm.cores.openai_client.endpoint import Endpoint
from mpillm.cores.openai_client.server_counts import Reading, finite, metrics_page

_LINE = re.compile(r"^(nv_\w+)(?:\{(.*)\})? (\S+)", re.MULTILINE)
_LABEL = re.compile(r'(?<!\w)(\w+)="((?:[^"\\]|\\.)*)"')
_REQUESTS, _BLOCKS = "nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics"
_PENDING = "nv_inference_pending_request_count"  # that no model has taken yet
_PROMPTS, _ANSWERS = "nv_llm_input_token_len_sum", "nv_llm_output_token_len_sum"


def reading_of(text: str) -> Reading:
    """Return what a page of Triton's metrics says: sums over its models, but for the fullest KV cache."""
    sums: dict[str, float] = defaultdict(float)  # by name, and by name and the label that says which value
    blocks: dict[str, dict[str, float]] = defaultdict(dict)  # by model
    for name, labels, number in _LINE.findall(text):
        known = dict(_LABEL.findall(labels))
        try:
            value = float(number)
        except ValueError:
            continue
        if not math.isfinite(value):
            continue
        sums[name] += value
        if name == _REQUESTS:
            sums[f"{name}/{known.get('request_type')}"] += value
        elif name == _BLOCKS:
            blocks[known.get("model", "")][known.get("kv_cache_block_type", "")] = value
    usages = [one["used"] / one["max"] for one in blocks.values() if one.get("max") and "used" in one]
    reused = [one["reused"] * one.get("tokens_per", 0) for one in blocks.values() if "reused" in one]
    waits = next((name for name in (f"{_REQUESTS}/waiting", _PENDING) if name in sums), "")
    found = Reading(
        running=sums.get(f"{_REQUESTS}/active"),
        waiting=sums.get(waits),
        kv_cache_usage=max(usages, default=None),
        prompt_tokens=sums.get(_PROMPTS),
        generated_tokens=sums.get(_ANSWERS),
        cached_tokens=sum(reused) if reused else None,
    )
    return finite(found)


def metrics_url(grpc: str, port: str = "") -> str:
    """Return where a server's metrics are; `port`: "" if it is the next to that of gRPC, Triton's default."""
    host, _, own = grpc.rpartition(":")
    return f"http://{host}:{port or int(own) + 1}"


async def read(endpoint: Endpoint) -> Reading:
    """Return what a server says; nothing of one that can't be asked."""
    return reading_of(await metrics_page(endpoint))
