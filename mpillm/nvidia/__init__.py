"""NVIDIA's API and files: nv-mitten's configurator, configuration classes and files, flags.

A plugin package in `core_names.PLUGIN_PACKAGES`, so this file imports nothing.
"""

RUNTIME_FLAGS = {
    "trtllm_endpoint": "mpillm.nvidia.flags:SERVE_FLAGS",
    "trtllm_disagg": "mpillm.nvidia.flags:SERVE_FLAGS",
    "triton_grpc": "mpillm.nvidia.flags:TRITON_FLAGS",
}
"""Runtime flags of a core. Other cores of TensorRT-LLM forward all flags."""

GROUPS: dict[str, tuple[str, ...]] = {}

READERS = {"config_file": "mpillm.nvidia.config_file"}
"""Modules that read the user's configuration files, for `options.layers`."""

_CHECKPOINT = "generate-engines runs it with the options in --trtllm_checkpoint_flags"
_BUILD = "generate-engines runs it with the options in --trtllm_build_flags"
PROGRAMS = {
    **dict.fromkeys(("convert-checkpoint", "quantize"), _CHECKPOINT),
    **dict.fromkeys(("trtllm-build", "build"), _BUILD),
    "tritonserver": "run-llm-server --harness_type=triton starts it",
    "trtllm-serve": "run-llm-server starts it with --core_type=trtllm_endpoint or trtllm_disagg",
    "inflight-batcher-llm-client": "`python -m mpillm triton-client tokens` takes its options",
    "end-to-end-test": "`python -m mpillm e2e-test` takes its options",
    "benchmark-core-model": "`python -m mpillm bench core-model` takes its options",
    "end-to-end-grpc-client": "`python -m mpillm triton-client text` takes its options",
}
"""Programs in NVIDIA's documentation, and their replacements in mpillm."""
