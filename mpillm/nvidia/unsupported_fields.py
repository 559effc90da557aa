"""Fields of NVIDIA's configurations without effect in mpillm. config.json and a note list them."""

from __future__ import annotations

from mpillm.options.field import Field

_HARNESS = "an internal of NVIDIA's harness"
UNSUPPORTED_FIELDS: dict[str, Field] = {
    name: Field(name, why)
    for name, why in {
        "input_dtype": "token ids are int32",
        "input_format": _HARNESS,
        "coalesced_tensor": _HARNESS,
        "enable_sort": _HARNESS,
        "gpu_copy_streams": _HARNESS,
        "gpu_inference_streams": _HARNESS,
        "server_num_issue_query_threads": "LoadGen issues queries from one thread",
        "numa_config": "the launcher places ranks: mpirun --bind-to, --map-by",
        "workspace_size": "the engine uses the memory that weights and KV cache leave free",
        "use_graphs": "the engine decides where it uses CUDA graphs",
        "warmup_iterations": "each core decides how long it warms up",
        "enable_metrics": "a run is always measured",
        "harness_use_hf_tokenizer": "the client uses the tokenizer in model_path",
        "server_use_hf_tokenizer": "a server uses its model's tokenizer",
        "trtllm_yml_override": "options of a server: --server_args '--extra_llm_api_options FILE'",
        "env_yml_override": "a server that is started has the run's environment",
        "server_instance_size": "GPUs of a server: tensor_parallelism x pipeline_parallelism",
        "server_in_foreground": "a run manages the servers that it starts",
        "active_generation_probe_timeout": "a client's warm-up sends a request to each server",
        **dict.fromkeys(
            (
                *("dynamo_cluster", "dynamo_frontend_host", "dynamo_frontend_port", "dynamo_router_mode"),
                *("dynamo_kv_overlap_weight", "dynamo_router_replica_sync", "dynamo_frontend_secondary"),
            ),
            "mpillm does not start a Dynamo cluster: docs/howto/disaggregated.md",
        ),
        "nsys_options": "mpillm does not start a profiler: start mpirun under nsys yourself",
        "capture_server_logs_dir": "a server's log is in the run directory",
        "disable_progress_display": "progress appears only on a terminal",
        "enable_ttft_latency_tracker": "first tokens are always measured",
        "performance_sample_count": "the data set determines it",
        "performance_sample_count_override": "a user_conf has it: *.*.performance_sample_count_override",
        "accuracy_sample_count_override": "a user_conf has it: *.*.accuracy_sample_count_override",
        "single_stream_expected_latency_ns": "a user_conf has it: *.SingleStream.target_latency",
        "use_token_latencies": "LoadGen's mlperf.conf sets it for each workload",
        "vboost_slider": "the administrator sets clocks: nvidia-smi boost-slider --vboost",
        "power_limit": "the administrator sets power limits: nvidia-smi --power-limit",
    }.items()
}
"""Fields by name; each description is the reason."""
