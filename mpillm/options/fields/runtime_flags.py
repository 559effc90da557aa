"""The known keys of trtllm_runtime_flags and trtllm_build_flags: their values, and the harness's defaults.

TensorRT-LLM's flags vary with the model, so its cores also get keys that are unknown here. mpillm's own cores
reject unknown keys (`options.flags`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpillm.core_names import (
    DEFAULT,
    DUMMY,
    EMBEDDED,
    TRITON,
    TRTLLM,
    TRTLLM_EXECUTOR,
    WITH_BACKENDS,
    load_object,
    provided,
)
from mpillm.options.field import Effect, Field
from mpillm.options.fields.effects import of_engines, used_by
from mpillm.options.fields.model import ModelFields
from mpillm.options.fields.topology import TopologyFields
from mpillm.options.parsers import boolean, positive

# A key that is another name of an option has the option's field. Any other key has its own field.
RUNTIME_FLAGS: dict[str, Field] = {
    "batch_scheduler_policy": ModelFields.batch_scheduler_policy,
    "context_chunking_policy": ModelFields.context_chunking_policy,
    "use_inflight_batching": Field(
        "use_inflight_batching",
        "false: batches run to their end",
        boolean,
        default=True,
        effect=of_engines(*EMBEDDED, *DUMMY, *TRTLLM_EXECUTOR, *TRITON),
    ),
    "enable_batch_size_tuning": Field(
        "enable_batch_size_tuning",
        "choose the batch size while running",
        boolean,
        default=False,
        effect=used_by(*TRTLLM_EXECUTOR),
    ),
    "enable_max_num_tokens_tuning": ModelFields.enable_max_num_tokens_tuning,
    "dynamic_batch_moving_average_window": Field(
        "dynamic_batch_moving_average_window",
        "iterations over which that tuning averages",
        positive,
        default=128,
        effect=used_by(*TRTLLM_EXECUTOR),
    ),
    "kvcache_free_gpu_mem_frac": ModelFields.kv_cache_free_gpu_mem_fraction,
    "enable_chunked_context": ModelFields.enable_chunked_context,
    "exclude_input_from_output": Field(
        "exclude_input_from_output", "answers do not begin with their prompt", boolean, default=True
    ),
    "max_batch_size": ModelFields.max_batch_size,
    "max_num_tokens": ModelFields.max_num_tokens,
}
# Values of some flags in Triton's templates, which also have other names for the flags.
_BATCHING = {"V1": False, "v1": False, "inflight_batching": True, "inflight_fused_batching": True}
OTHER_NAMES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "kv_cache_free_gpu_mem_fraction": ("kvcache_free_gpu_mem_frac", {}),
    "exclude_input_in_output": ("exclude_input_from_output", {}),
    "triton_max_batch_size": ("max_batch_size", {}),
    "batching_strategy": ("use_inflight_batching", _BATCHING),
    "gpt_model_type": ("use_inflight_batching", _BATCHING),
    "trtllm_backend": ("trtllm_backend", {"pytorch": "pytorch", "cpp": "cpp", "trt": "cpp"}),
}


def _by_name(*options: Field) -> dict[str, Field]:
    return {option.name: option for option in options}


# Options that NVIDIA's files also set among the flags.
RUNTIME_OPTIONS = _by_name(
    TopologyFields.num_ctx_servers,
    TopologyFields.ctx_tp_size,
    TopologyFields.num_gen_servers,
    TopologyFields.gen_tp_size,
)
BUILD_OPTIONS = _by_name(
    TopologyFields.tensor_parallelism,
    TopologyFields.pipeline_parallelism,
    TopologyFields.moe_expert_parallelism,
)


def _of_client(why: str) -> Effect:
    """Return the effect of a flag for NVIDIA's client; `why`: what replaces the flag in mpillm."""
    return Effect((), measured=False, instead=why)


KNOWN_FLAGS: dict[str, Field] = {
    **RUNTIME_FLAGS,
    "http_backend": Field(
        "http_backend",
        "the client's library",
        default="custom_http",
        choices=("custom_http", "openai_async"),
        effect=_of_client("there is one client"),
    ),
    "workers_per_core": Field(
        "workers_per_core",
        "client processes",
        positive,
        default=2,
        effect=_of_client("each worker rank is a client: mpirun -n decides"),
    ),
}
"""Runtime flags whose effect is known here. Flags that mpillm only passes on to TensorRT-LLM are missing."""

_SIZES = (*BUILD_OPTIONS, "tp_size", "pp_size", "moe_ep_size")
OUR_BUILD_FLAGS = ("max_batch_size", "max_num_tokens", "max_seq_len", "max_input_len", "max_beam_width")
OUR_CHECKPOINT_FLAGS = ("qformat", "kv_cache_dtype", "calib_size")
_NAMES: dict[str, dict[tuple[str, ...], tuple[str, ...]]] = {
    "trtllm_checkpoint_flags": {(DEFAULT,): (*OUR_CHECKPOINT_FLAGS, *_SIZES)},
    "trtllm_build_flags": {(DEFAULT, *DUMMY): (*OUR_BUILD_FLAGS, *_SIZES)},
}


def names_of(flags: Field, core: str) -> tuple[str, ...] | None:
    """Return the keys of flags that a core supports; None: it passes on all. `core`: with its backend."""
    if flags.name != "trtllm_runtime_flags":
        return next((names for cores, names in _NAMES[flags.name].items() if core in cores), None)
    name = core.partition(" ")[0]
    if name not in TRTLLM:
        return (*RUNTIME_FLAGS, *RUNTIME_OPTIONS)
    if (path := provided("RUNTIME_FLAGS").get(name)) is None or core not in WITH_BACKENDS:
        return None
    names: tuple[str, ...] = load_object(path)
    return names
