"""Read the metrics of tritonserver and of TensorRT-LLM's backend.

Source: custom_metrics_reporter.cc of that backend. Requests and blocks refer to each model's last step.
Tokens and reused blocks are totals since the server's start.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict

from mpillm.cores.openai_client.endpoint import RemoteServer
from mpillm.cores.openai_client.server_counts import ServerCounts, finite, metrics_page

_LINE = re.compile(r"^(nv_\w+)(?:\{(.*)\})? (\S+)", re.MULTILINE)
_LABEL = re.compile(r'(?<!\w)(\w+)="((?:[^"\\]|\\.)*)"')
_REQUESTS, _BLOCKS = "nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics"
_PENDING = "nv_inference_pending_request_count"  # not yet accepted by a model
_PROMPTS, _ANSWERS = "nv_llm_input_token_len_sum", "nv_llm_output_token_len_sum"


def reading_of(text: str) -> ServerCounts:
    """Parse Triton's metrics: sums over the models, and the maximum KV cache usage."""
    sums: dict[str, float] = defaultdict(float)  # by name, and by ``name/request_type``
    blocks: dict[str, dict[str, float]] = defaultdict(dict)  # by model
    for name, labels, number in _LINE.findall(text):
        label_values = dict(_LABEL.findall(labels))
        try:
            value = float(number)
        except ValueError:
            continue
        if not math.isfinite(value):
            continue
        sums[name] += value
        if name == _REQUESTS:
            sums[f"{name}/{label_values.get('request_type')}"] += value
        elif name == _BLOCKS:
            blocks[label_values.get("model", "")][label_values.get("kv_cache_block_type", "")] = value
    usages = [one["used"] / one["max"] for one in blocks.values() if one.get("max") and "used" in one]
    reused = [one["reused"] * one.get("tokens_per", 0) for one in blocks.values() if "reused" in one]
    waits = next((name for name in (f"{_REQUESTS}/waiting", _PENDING) if name in sums), "")
    reading = ServerCounts(
        running=sums.get(f"{_REQUESTS}/active"),
        waiting=sums.get(waits),
        kv_cache_usage=max(usages, default=None),
        prompt_tokens=sums.get(_PROMPTS),
        generated_tokens=sums.get(_ANSWERS),
        cached_tokens=sum(reused) if reused else None,
    )
    return finite(reading)


def metrics_url(grpc: str, port: str = "") -> str:
    """Return the URL of a server's metrics. `port`: "" for Triton's default, gRPC's port plus one."""
    host, _, grpc_port = grpc.rpartition(":")
    return f"http://{host}:{port or int(grpc_port) + 1}"


async def read(endpoint: RemoteServer) -> ServerCounts:
    """Return a server's metrics; empty if the server does not answer."""
    return reading_of(await metrics_page(endpoint))
