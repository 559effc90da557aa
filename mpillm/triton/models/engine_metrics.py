"""Engine metrics at Triton's metrics endpoint: the `nv_trt_llm_*` families of TensorRT-LLM's backend.

Each has the labels `model`, `version`, and one that names the value. Values per step refer to the last step.
Source: the README of triton-inference-server/tensorrtllm_backend, Triton Metrics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import psutil
import triton_python_backend_utils as pb_utils

from mpillm.engine.engine import Engine


class _MetricFamily(NamedTuple):
    name: str
    description: str
    label: str  # name of the label that names the value
    values: Callable[[Engine], Mapping[str, float]]


def _requests(engine: Engine) -> Mapping[str, float]:
    scheduler, step = engine.scheduler, engine.last_step
    return {
        "context": step.contexts,
        "scheduled": step.contexts + step.generations,
        "max": engine.config.max_batch_size,
        "active": len(scheduler.running) + len(scheduler.waiting),
    }


def _memory(engine: Engine) -> Mapping[str, float]:
    return {"pinned": 0, "gpu": engine.gpu_bytes, "cpu": psutil.Process().memory_info().rss}


def _blocks(engine: Engine) -> Mapping[str, float]:
    blocks = engine.blocks
    return {
        "tokens_per": engine.config.tokens_per_block,
        "used": blocks.n_blocks - blocks.n_free,
        "free": blocks.n_free,
        "max": blocks.n_blocks,
    }


def _inflight(engine: Engine) -> Mapping[str, float]:
    step = engine.last_step
    return {
        "micro_batch_id": 0,
        "generation_requests": step.generations,
        "total_context_tokens": step.context_tokens,
    }


def _static(engine: Engine) -> Mapping[str, float]:
    return {
        "total_generation_tokens": engine.generated_tokens,
        "empty_generation_slots": engine.config.max_batch_size - len(engine.scheduler.running),
        "total_context_tokens": engine.prompt_tokens,
    }


def _general(engine: Engine) -> Mapping[str, float]:
    return {"iteration_counter": engine.n_steps, "timestamp": int(time.time())}


def _disaggregated(_engine: Engine) -> Mapping[str, float]:
    """Return zeros: behind Triton, no KV cache is transferred."""
    return {"kv_cache_transfer_ms": 0, "request_count": 0}


_FAMILIES = (
    _MetricFamily("request", "TRT LLM request metrics", "request_type", _requests),
    _MetricFamily("runtime_memory", "TRT LLM runtime memory metrics", "memory_type", _memory),
    _MetricFamily("kv_cache_block", "TRT LLM KV cache block metrics", "kv_cache_block_type", _blocks),
    _MetricFamily("general", "General TRT LLM metrics", "general_type", _general),
)
_DISAGGREGATED = _MetricFamily(
    "disaggregated_serving",
    "TRT LLM disaggregated serving metrics",
    "disaggregated_serving_type",
    _disaggregated,
)
_INFLIGHT = _MetricFamily(
    "inflight_batcher",
    "TRT LLM inflight_batcher-specific metrics",
    "inflight_batcher_specific_metric",
    _inflight,
)
_V1 = _MetricFamily("v1", "TRT LLM v1-specific metrics", "v1_specific_metric", _static)


class EngineMetrics:
    """Metrics of one model. The engine's thread calls `update` periodically."""

    def __init__(self, engine: Engine, model: str, version: str) -> None:
        self._engine = engine
        is_static = engine.config.batch_scheduler_policy == "static"
        self._families: list[Any] = []  # Triton's objects, which must outlive their metrics
        self._gauges: list[tuple[_MetricFamily, dict[str, Any]]] = []
        self._last_values: dict[tuple[str, str], float] = {}
        for family in (*_FAMILIES, _V1 if is_static else _INFLIGHT, _DISAGGREGATED):
            kind = "COUNTER" if family is _DISAGGREGATED else "GAUGE"
            metric_family = pb_utils.MetricFamily(
                name=f"nv_trt_llm_{family.name}_metrics",
                description=family.description,
                kind=getattr(pb_utils.MetricFamily, kind),
            )
            self._families.append(metric_family)
            labels = {"model": model, "version": version}
            gauges = {
                name: metric_family.Metric(labels={**labels, family.label: name})
                for name in family.values(engine)
            }
            self._gauges.append((family, gauges))
        self.update()

    def update(self) -> None:
        """Set the metrics that have changed. Each costs a message to another process."""
        for family, gauges in self._gauges:
            for name, value in family.values(self._engine).items():
                if self._last_values.get((family.name, name), 0) != value:
                    self._last_values[family.name, name] = value
                    gauges[name].set(value)

    def close(self) -> None:
        """Drop the metrics, then their families."""
        self._gauges.clear()
        self._families.clear()
