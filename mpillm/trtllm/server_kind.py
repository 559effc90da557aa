"""TensorRT-LLM's `trtllm-serve`. The arguments come from its sources and are not tested against it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from mpillm.programs.servers.kind import ServerKind, ServerSpec, named, switch


def _arguments(spec: ServerSpec) -> Sequence[str]:
    return (
        *("trtllm-serve", "serve", spec.model, "--host", spec.host, "--port", str(spec.port)),
        *("--extra_llm_api_options", f"{spec.base}.yaml"),
    )


def _file(spec: ServerSpec, values: Mapping[str, Any]) -> str:
    """Return `LlmArgs` as YAML: the server's section, and arguments without a command-line option."""
    cache = {**spec.llm_args.get("kv_cache_config", {})}
    cache["enable_block_reuse"] = values["enable_kv_cache_reuse"]
    if "kv_cache_dtype" in values:
        cache["dtype"] = values["kv_cache_dtype"]
    args = {**spec.llm_args, "kv_cache_config": cache, "enable_iter_perf_stats": True}
    if spec.role:  # TensorRT-LLM needs it for the handoff
        args.setdefault("cache_transceiver_config", {"backend": "DEFAULT"})
    if spec.role == "context":  # TensorRT-LLM has no overlap scheduler for this role
        args.setdefault("disable_overlap_scheduler", True)
    return yaml.safe_dump(args, sort_keys=False)


TRTLLM_SERVE = ServerKind(
    name="trtllm-serve",
    arguments=_arguments,
    options={
        "tensor_parallelism": named("--tp_size"),
        "pipeline_parallelism": named("--pp_size"),
        "moe_expert_parallelism": named("--ep_size"),
        "kv_cache_free_gpu_mem_fraction": named("--kv_cache_free_gpu_memory_fraction"),
        "max_batch_size": named("--max_batch_size"),
        "max_num_tokens": named("--max_num_tokens"),
        "max_seq_len": named("--max_seq_len"),
        "enable_chunked_context": switch("--enable_chunked_prefill"),
    },
    always={"enable_kv_cache_reuse": False},  # TensorRT-LLM's default is True, which MLPerf forbids
    file=_file,
    in_file=("enable_kv_cache_reuse", "kv_cache_dtype"),
    binds_reserved_port=False,
    names_model=True,  # the folder's
    disagg_protocol="disaggregated_params",
    takes_llm_args=True,
    install="install TensorRT-LLM, as in NVIDIA's containers",
)
