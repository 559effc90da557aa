"""The keys of trtllm_runtime_flags and trtllm_build_flags that we know: what they may be, and the harness's defaults.

TensorRT-LLM's flags vary with the model, so its own cores are passed keys that stand nowhere here. Our cores refuse them.
"""

from __future__ import annotations

from mpillm.configurator import Field
from mpillm.fields import model, topology
from mpillm.fields.parsers import boolean, positive

# Those that stand for an option have its default; the others are fields of their own.
RUNTIME_FLAGS: dict[str, Field] = {
    "batch_scheduler_policy": model.batch_scheduler_policy,
    "context_chunking_policy": model.context_chunking_policy,
    "use_inflight_batching": Field("use_inflight_batching", "false: batches run to their end", boolean, default=True),
    "enable_batch_size_tuning": Field("enable_batch_size_tuning", "choose the batch size while running", boolean, default=False),
    "enable_max_num_tokens_tuning": Field("enable_max_num_tokens_tuning", "choose max_num_tokens while running", boolean, default=False),
    "dynamic_batch_moving_average_window": Field(
        "dynamic_batch_moving_average_window", "iterations over which that tuning averages", positive, default=128
    ),
    "kvcache_free_gpu_mem_frac": model.kv_cache_free_gpu_mem_fraction,
    "enable_chunked_context": model.enable_chunked_context,
    "exclude_input_from_output": Field("exclude_input_from_output", "answers do not begin with their prompt", boolean, default=True),
    "max_batch_size": model.max_batch_size,
    "max_num_tokens": model.max_num_tokens,
}
TENSORRT_ONLY = ("enable_batch_size_tuning", "enable_max_num_tokens_tuning", "dynamic_batch_moving_average_window")

# The harness's names of policies, and TensorRT-LLM's.
SCHEDULER_POLICIES = {"max_util": "MAX_UTILIZATION", "no_evict": "GUARANTEED_NO_EVICT", "static": "STATIC_BATCH"}
CHUNKING_POLICIES = {name: name.upper() for name in model.context_chunking_policy.choices}

# What the reference's files also say among the flags, and is an option.
RUNTIME_OPTIONS: dict[str, Field] = {
    "num_ctx_servers": topology.num_ctx_servers,
    "ctx_tp_size": topology.ctx_tp_size,
    "num_gen_servers": topology.num_gen_servers,
    "gen_tp_size": topology.gen_tp_size,
}
BUILD_OPTIONS: dict[str, Field] = {
    "tensor_parallelism": topology.tensor_parallelism,
    "pipeline_parallelism": topology.pipeline_parallelism,
    "moe_expert_parallelism": topology.moe_expert_parallelism,
}
