"""The known keys of trtllm_runtime_flags and trtllm_build_flags: their values, and the harness's defaults.

TensorRT-LLM's flags vary with the model, so its cores receive keys that are unknown here; ours refuse them
(`config.flags`).
"""

from __future__ import annotations

from collections.abc import Mapping

from mpillm.configurator import Field
from mpillm.configurator.parsers import boolean, positive
from mpillm.fields.model import ModelFields
from mpillm.fields.topology import TopologyFields

# A key that is another name of an option has that option's field, any other a field of its own.
RUNTIME_FLAGS: dict[str, Field] = {
    "batch_scheduler_policy": ModelFields.batch_scheduler_policy,
    "context_chunking_policy": ModelFields.context_chunking_policy,
    "use_inflight_batching": Field(
        "use_inflight_batching", "false: batches run to their end", boolean, default=True
    ),
    "enable_batch_size_tuning": Field(
        "enable_batch_size_tuning", "choose the batch size while running", boolean, default=False
    ),
    "enable_max_num_tokens_tuning": ModelFields.enable_max_num_tokens_tuning,
    "dynamic_batch_moving_average_window": Field(
        "dynamic_batch_moving_average_window",
        "iterations over which that tuning averages",
        positive,
        default=128,
    ),
    "kvcache_free_gpu_mem_frac": ModelFields.kv_cache_free_gpu_mem_fraction,
    "enable_chunked_context": ModelFields.enable_chunked_context,
    "exclude_input_from_output": Field(
        "exclude_input_from_output", "answers do not begin with their prompt", boolean, default=True
    ),
    "max_batch_size": ModelFields.max_batch_size,
    "max_num_tokens": ModelFields.max_num_tokens,
}
# Triton's templates' names for some of them, and their words for values.
_BATCHING = {"V1": False, "v1": False, "inflight_batching": True, "inflight_fused_batching": True}
OTHER_NAMES: dict[str, tuple[str, Mapping[str, bool]]] = {
    "kv_cache_free_gpu_mem_fraction": ("kvcache_free_gpu_mem_frac", {}),
    "exclude_input_in_output": ("exclude_input_from_output", {}),
    "triton_max_batch_size": ("max_batch_size", {}),
    "batching_strategy": ("use_inflight_batching", _BATCHING),
    "gpt_model_type": ("use_inflight_batching", _BATCHING),
}
TENSORRT_ONLY = (
    "enable_batch_size_tuning",
    "dynamic_batch_moving_average_window",
)


def _by_name(*options: Field) -> dict[str, Field]:
    return {option.name: option for option in options}


# Options that the reference's files also state among the flags.
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
