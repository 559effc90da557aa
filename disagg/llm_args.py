"""Names of TensorRT-LLM's LLM arguments and of their keys, to distinguish misspelled names from new ones."""

from __future__ import annotations

# From tensorrt_llm/llmapi/llm_args.py (1.0 to August 2026) and the arguments that `trtllm-serve` adds in
# get_llm_args. A name that is missing here is accepted, unless it resembles one of these.
LLM_ARGUMENTS = frozenset(
    """
    allreduce_strategy attention_dp_config attn_backend backend batch_wait_max_tokens_ratio
    batch_wait_timeout_iters batch_wait_timeout_ms batched_logits_processor batching_type build_config
    cache_transceiver_config calib_config checkpoint_format checkpoint_io_policy checkpoint_loader
    context_parallel_size cp_config cuda_graph_config custom_tokenizer decoding_config disable_mm_encoder
    disable_overlap_scheduler dtype dwdp_config embedding_parallel_mode enable_attention_dp enable_autotuner
    enable_build_cache enable_chunked_prefill enable_early_first_token_response
    enable_encoder_decoder_mixed_cuda_graph enable_energy_metrics enable_in_graph_sampling
    enable_iter_perf_stats enable_iter_req_stats enable_layerwise_nvtx_marker enable_lm_head_tp_in_adp
    enable_lora enable_low_latency_host_dispatch enable_min_latency enable_mixed_sampler
    enable_mla_skip_correction enable_prompt_adapter enable_resource_governor enable_sleep
    enable_speculative_beam_history_d2h enable_tqdm enable_trtllm_sampler encode_only
    encoder_cuda_graph_config encoder_max_batch_size encoder_max_num_tokens env_overrides
    extended_runtime_perf_knob_config fail_fast_on_attention_window_too_large fast_build
    force_dynamic_quantization free_gpu_memory_fraction garbage_collection_gen0_threshold
    gather_generation_logits generation_config gms_config gpus_per_node guided_decoding_backend
    iter_stats_max_iterations kv_cache_compression_config kv_cache_config kv_cache_dtype kv_connector_config
    layer_wise_benchmarks_config load_format lora_config max_batch_size max_beam_width max_input_len
    max_num_tokens max_prompt_adapter_token max_seq_len max_stats_len mla_skip_correction_threshold
    mm_encoder_only model model_kwargs moe_cluster_parallel_size moe_config moe_expert_parallel_size
    moe_tensor_parallel_size mpi_session multimodal_config mx_config normalize_log_probs
    num_postprocess_workers num_serve_frontends nvfp4_gemm_config orchestrator_type otlp_traces_endpoint
    peft_cache_config perf_metrics_max_requests perf_metrics_output_dir pipeline_parallel_size
    post_processor_hook postprocess_tokenizer_dir pp_partition prefill_capture_num_tokens
    prefill_cuda_graph_backend print_iter_log prometheus_metrics_config quant_config ray_placement_config
    ray_worker_extension_cls ray_worker_nsight_options reasoning_parser reorder_policy_config
    request_stats_max_iterations return_perf_metrics revision sampler_force_async_worker sampler_type
    scheduler_config skip_tokenizer_init sleep_config sparse_attention_config speculative_config
    stream_interval telemetry_config tensor_parallel_size tokenizer tokenizer_mode tokenizer_revision
    torch_compile_config trust_remote_code use_cute_dsl_bf16_bmm use_cute_dsl_bf16_gemm
    use_cute_dsl_blockscaling_bmm use_cute_dsl_blockscaling_mm use_fine_grained_sync use_torch_sampler
    video_pruning_rate
    """.split()  # noqa: SIM905 (so many names, not so many lines)
)

# From the same file, and from tensorrt_llm/llmapi/disagg_utils.py and serve/router.py: the keys inside
# mappings that mpillm reads in part, and inside the leader's mappings.
INNER_ARGUMENTS = {
    outer: frozenset(names.split())
    for outer, names in {
        "kv_cache_config": """
            attention_dp_events_gather_period_ms avg_seq_len block_reuse_policy copy_on_partial_reuse
            cross_kv_cache_fraction disk_cache_path disk_cache_size disk_prefetch_num_reqs dtype
            enable_block_reuse enable_partial_reuse enable_swa_scratch_reuse event_buffer_max_size
            free_gpu_memory_fraction host_cache_size iteration_stats_interval kv_cache_event_hash_algo
            mamba_ssm_cache_dtype mamba_ssm_philox_rounds mamba_ssm_stochastic_rounding
            mamba_state_cache_interval max_attention_window max_gpu_total_bytes max_tokens max_util_for_resume
            onboard_blocks pool_ratio secondary_offload_min_priority sink_token_length tokens_per_block
            use_kv_cache_manager_v2 use_uvm""",
        "cache_transceiver_config": """
            backend kv_cache_bounce_size_mb kv_transfer_poll_interval_ms kv_transfer_sender_future_timeout_ms
            kv_transfer_timeout_ms max_num_tokens max_tokens_in_buffer transceiver_runtime""",
        "scheduler_config": """
            capacity_scheduler_policy context_chunking_policy dynamic_batch_config
            enable_prefix_aware_scheduling use_python_scheduler waiting_queue_policy""",
        "router": "max_batch_size max_num_tokens tokens_per_block type use_tokens",
        "conditional_disagg_config": "max_local_prefill_length",
        "otlp_config": "otlp_traces_endpoint",
        "disagg_cluster": """
            cluster_name cluster_uri heartbeat_interval_sec inactive_interval_sec inactive_timeout_sec
            minimal_instances""",
    }.items()
}
