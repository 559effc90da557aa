"""vLLM's OpenAI server: `vllm serve`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpillm.servers.kind import KnownFailure, ServerKind, Wanted, named, switch


def _words(wanted: Wanted) -> Sequence[str]:
    return (
        *("vllm", "serve", wanted.model, "--served-model-name", wanted.name),
        *("--host", wanted.host, "--port", str(wanted.port)),
    )


def _experts(value: Any) -> Sequence[str]:
    # Its expert parallel size is that of the tensor parallel group.
    return ("--enable-expert-parallel",) if value > 1 else ()


VLLM = ServerKind(
    "vllm",
    _words,
    {
        "tensor_parallelism": named("--tensor-parallel-size"),
        "pipeline_parallelism": named("--pipeline-parallel-size"),
        "moe_expert_parallelism": _experts,
        "load_format": named("--load-format"),
        "dtype": named("--dtype"),
        "quantization": named("--quantization", fp8="fp8"),
        "kv_cache_dtype": named("--kv-cache-dtype", auto="auto", bfloat16="bfloat16", fp8="fp8"),
        "kv_cache_free_gpu_mem_fraction": named("--gpu-memory-utilization"),
        "max_batch_size": named("--max-num-seqs"),
        "max_num_tokens": named("--max-num-batched-tokens"),
        "max_seq_len": named("--max-model-len"),
        "enable_kv_cache_reuse": switch("--enable-prefix-caching", "--no-enable-prefix-caching"),
        "enable_chunked_context": switch("--enable-chunked-prefill", "--no-enable-chunked-prefill"),
    },
    always={"enable_kv_cache_reuse": False},  # which vLLM does by default, and MLPerf forbids
    environment={"VLLM_NO_USAGE_STATS": "1"},
    failures=(
        KnownFailure(
            r"max seq len \(\d+\) is larger than the maximum number of tokens|"
            r"larger than the maximum number of tokens that can be stored in KV cache",
            "its KV cache is smaller than one longest request",
            "lower --max_seq_len, or raise --kv_cache_free_gpu_mem_fraction",
        ),
        KnownFailure(
            r"Free memory on device .* is less than desired GPU memory utilization",
            "other processes hold memory of the GPU",
            "end them, or lower --kv_cache_free_gpu_mem_fraction",
        ),
    ),
    install="pip install vllm, or activate the environment that has it",
)
