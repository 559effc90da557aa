"""Runtime flags of Triton's models and `trtllm-serve`."""

from __future__ import annotations

from collections.abc import Mapping

from mpillm.options.fields.runtime_flags import RUNTIME_OPTIONS

# Parameters of the `tensorrt_llm` model in TensorRT-LLM 1.x's template, under their names as flags, and flags
# that set a field of Triton's configuration.
_KINDS: Mapping[type, str] = {
    bool: "cuda_graph_mode decoupled_mode enable_chunked_context enable_context_fmha_fp32_acc"
    " enable_kv_cache_reuse enable_trt_overlap exclude_input_from_output kv_cache_onboard_blocks"
    " multi_block_mode normalize_log_probs speculative_decoding_fast_logits",
    int: "cancellation_check_period_ms cuda_graph_cache_size iter_stats_max_iterations"
    " kv_cache_host_memory_bytes lookahead_ngram_size lookahead_verification_set_size lookahead_window_size"
    " lora_cache_host_memory_bytes lora_cache_max_adapter_size lora_cache_optimal_adapter_size"
    " max_batch_size max_beam_width max_queue_delay_microseconds max_queue_size max_tokens_in_paged_kv_cache"
    " num_nodes recv_poll_period_ms request_stats_max_iterations sink_token_length stats_check_period_ms",
    float: "cross_kv_cache_fraction gpu_weights_percent kvcache_free_gpu_mem_frac"
    " lora_cache_gpu_memory_fraction",
    str: "batch_scheduler_policy decoding_mode eagle_choices encoder_engine_dir executor_worker_path"
    " guided_decoding_backend lora_prefetch_dir max_attention_window_size medusa_choices participant_ids"
    " tokenizer_dir triton_backend xgrammar_tokenizer_info_path",
}
TRITON_PARAMETERS = {name: kind for kind, names in _KINDS.items() for name in names.split()}
"""Type of each flag's value. For a wrong type, Triton's backend only logs a line and uses its default, so
`generate-triton-config` rejects it."""

TRITON_OTHERS = (
    *("context_chunking_policy", "use_inflight_batching", "enable_batch_size_tuning"),
    *("enable_max_num_tokens_tuning", "dynamic_batch_moving_average_window", "max_batch_size"),
    *("max_num_tokens", "max_queue_delay_microseconds", "max_queue_size", "decoupled_mode", "triton_backend"),
)
"""Flags that are not parameters."""

_TEMPLATES = (  # in other parts of the templates: `generate-triton-config` uses or rejects them
    *("engine_dir", "gpu_device_ids", "encoder_input_features_data_type", "logits_datatype"),
    *("prompt_embedding_table_data_type", "preprocessing_instance_count", "postprocessing_instance_count"),
    "bls_instance_count",
)
TRITON_FLAGS = (*TRITON_PARAMETERS, *TRITON_OTHERS, *_TEMPLATES, *RUNTIME_OPTIONS)
SERVE_FLAGS = (
    *("trtllm_backend", "batch_scheduler_policy", "context_chunking_policy", "enable_chunked_context"),
    *("kvcache_free_gpu_mem_frac", "enable_kv_cache_reuse", "max_batch_size", "max_num_tokens"),
    *("max_seq_len", "max_beam_width", "num_postprocess_workers", "max_concurrency"),
    *RUNTIME_OPTIONS,
)
