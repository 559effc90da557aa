"""Fields of NVIDIA's configurations without effect here: kept in config.json, named when a run starts."""

from __future__ import annotations

from mpillm.options.field import Field

_HARNESS = "how NVIDIA's harness feeds its engine"
PASSED_OVER: dict[str, Field] = {
    name: Field(name, why)
    for name, why in {
        "input_dtype": "token ids are int32",
        "input_format": _HARNESS,
        "coalesced_tensor": _HARNESS,
        "enable_sort": _HARNESS,
        "gpu_copy_streams": _HARNESS,
        "gpu_inference_streams": _HARNESS,
        "server_num_issue_query_threads": "LoadGen issues queries from one thread",
        "numa_config": "where ranks run is the launcher's: mpirun --bind-to, --map-by",
        "workspace_size": "the engine takes what is left beside weights and KV cache",
        "use_graphs": "the engine decides where it uses CUDA graphs",
        "warmup_iterations": "each core warms up as far as it needs",
        "enable_metrics": "what a run does is always measured",
        "harness_use_hf_tokenizer": "the client's tokenizer is that of model_path",
        "server_use_hf_tokenizer": "a server's tokenizer is that of its model",
        "trtllm_yml_override": "options of a server: --server_args '--extra_llm_api_options FILE'",
        "env_yml_override": "a server that is started has the run's environment",
        "server_instance_size": "GPUs of a server: tensor_parallelism x pipeline_parallelism",
        "server_in_foreground": "a run owns the servers that it starts",
        "active_generation_probe_timeout": "a client's warm-up asks each server for an answer",
        **dict.fromkeys(
            (
                *("dynamo_cluster", "dynamo_frontend_host", "dynamo_frontend_port", "dynamo_router_mode"),
                *("dynamo_kv_overlap_weight", "dynamo_router_replica_sync", "dynamo_frontend_secondary"),
            ),
            "no cluster of Dynamo is started: docs/howto/disaggregated.md",
        ),
        "nsys_options": "a run is no profile: start mpirun under nsys yourself",
        "capture_server_logs_dir": "a server's log is in the run directory",
        "disable_progress_display": "progress goes to a terminal alone",
        "enable_ttft_latency_tracker": "first tokens are always measured",
        "performance_sample_count": "the data set's",
        "performance_sample_count_override": "a user_conf has it: *.*.performance_sample_count_override",
        "accuracy_sample_count_override": "a user_conf has it: *.*.accuracy_sample_count_override",
        "single_stream_expected_latency_ns": "a user_conf has it: *.SingleStream.target_latency",
        "use_token_latencies": "LoadGen's mlperf.conf sets it for each workload",
        "vboost_slider": "clocks are the administrator's: nvidia-smi boost-slider --vboost",
        "power_limit": "power limits are the administrator's: nvidia-smi --power-limit",
    }.items()
}
"""By name; the description says why it has no effect."""
