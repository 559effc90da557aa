"""The names of TensorRT-LLM's LLM arguments: which unknown keys of a disaggregation YAML are arguments and which are typing errors."""

from __future__ import annotations

# From tensorrt_llm/llmapi/llm_args.py and the arguments that `trtllm-serve` adds in get_llm_args. A name that is missing here still
# passes inside a server section; only at the top level of the file must a key be known.
LLM_ARGUMENTS = frozenset(
    """
    allreduce_strategy attention_dp_config attn_backend backend batched_logits_processor batching_type build_config
    cache_transceiver_config calib_config checkpoint_format checkpoint_loader context_parallel_size cp_config cuda_graph_config
    custom_tokenizer decoding_config disable_overlap_scheduler dtype embedding_parallel_mode enable_attention_dp enable_autotuner
    enable_build_cache enable_chunked_prefill enable_iter_perf_stats enable_iter_req_stats enable_layerwise_nvtx_marker
    enable_lm_head_tp_in_adp
    enable_lora enable_min_latency enable_mixed_sampler enable_prompt_adapter enable_sleep enable_tqdm enable_trtllm_sampler
    env_overrides extended_runtime_perf_knob_config fail_fast_on_attention_window_too_large fast_build force_dynamic_quantization
    free_gpu_memory_fraction garbage_collection_gen0_threshold gather_generation_logits gpus_per_node guided_decoding_backend
    iter_stats_max_iterations kv_cache_config kv_cache_dtype kv_connector_config load_format lora_config max_batch_size max_beam_width
    max_input_len max_num_tokens max_prompt_adapter_token max_seq_len max_stats_len mm_encoder_only model moe_cluster_parallel_size
    moe_config moe_expert_parallel_size moe_tensor_parallel_size mpi_session normalize_log_probs num_postprocess_workers
    nvfp4_gemm_config orchestrator_type otlp_traces_endpoint peft_cache_config perf_metrics_max_requests pipeline_parallel_size
    postprocess_tokenizer_dir print_iter_log quant_config reasoning_parser request_stats_max_iterations return_perf_metrics revision
    sampler_type scheduler_config skip_tokenizer_init sparse_attention_config speculative_config stream_interval
    tensor_parallel_size tokenizer tokenizer_mode tokenizer_revision torch_compile_config trust_remote_code use_torch_sampler
    video_pruning_rate
    """.split()  # noqa: SIM905 (eighty names, not eighty lines)
)
