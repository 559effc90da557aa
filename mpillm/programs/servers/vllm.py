"""vLLM's OpenAI server: `vllm serve`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from launch.command import Command, KnownFailure
from mpillm.programs.servers.kind import ServerKind, Wanted, named, switch

_SIDE_CHANNEL = "side_channel"
_KV_ROLES = {"context": "kv_producer", "generation": "kv_consumer"}


def _words(wanted: Wanted) -> Sequence[str]:
    return (
        *("vllm", "serve", wanted.model, "--served-model-name", wanted.name),
        *("--host", wanted.host, "--port", str(wanted.port)),
    )


def _experts(value: Any) -> Sequence[str]:
    # Its expert parallel size is that of the tensor parallel group.
    return ("--enable-expert-parallel",) if value > 1 else ()


def _half(wanted: Wanted) -> Command:
    # KV caches go over NIXL, also between CPUs; halves find each other by the side channel.
    kv = json.dumps({"kv_connector": "NixlConnector", "kv_role": _KV_ROLES[wanted.role]})
    channel = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": wanted.address,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(wanted.more_ports[_SIDE_CHANNEL]),
    }
    return Command(("--kv-transfer-config", kv), channel)


def _of_nodes(wanted: Wanted) -> Command:
    part = wanted.part
    words = ["--nnodes", str(part.n), "--node-rank", str(part.node)]
    words += ["--master-addr", part.host, "--master-port", str(part.port)]
    # Its queues between nodes listen there.
    return Command((*words, *(["--headless"] if part.node else [])), {"VLLM_HOST_IP": wanted.address})


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
            r"Free memory on device .{1,200} is less than desired GPU memory utilization",
            "other processes hold memory of the GPU",
            "end them, or lower --kv_cache_free_gpu_mem_fraction",
        ),
        KnownFailure(
            r"NIXL is not available|No module named 'nixl",
            "it has no NIXL, by which its halves hand KV caches over",
            "pip install nixl where vLLM is",
        ),
    ),
    names_model=True,
    handover="kv_transfer_params",
    half=_half,
    half_ports=(_SIDE_CHANNEL,),
    of_nodes=_of_nodes,
    install="pip install vllm, or activate the environment that has it",
)
