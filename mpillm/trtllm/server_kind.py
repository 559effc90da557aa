"""TensorRT-LLM's `trtllm-serve`. The words are from its sources; it has not been run here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from mpillm.programs.servers.kind import ServerKind, Wanted, named, switch


def _words(wanted: Wanted) -> Sequence[str]:
    return (
        *("trtllm-serve", "serve", wanted.model, "--host", wanted.host, "--port", str(wanted.port)),
        *("--extra_llm_api_options", f"{wanted.base}.yaml"),
    )


def _file(wanted: Wanted, values: Mapping[str, Any]) -> str:
    """Return `LlmArgs` as YAML: those of its section, and those that have no option on the command line."""
    cache = {**wanted.llm_args.get("kv_cache_config", {})}
    cache["enable_block_reuse"] = values["enable_kv_cache_reuse"]
    if "kv_cache_dtype" in values:
        cache["dtype"] = values["kv_cache_dtype"]
    made = {**wanted.llm_args, "kv_cache_config": cache, "enable_iter_perf_stats": True}
    if wanted.role:  # without it TensorRT-LLM hands no KV cache over
        made.setdefault("cache_transceiver_config", {"backend": "DEFAULT"})
    if wanted.role == "context":  # which has no overlap scheduler there
        made.setdefault("disable_overlap_scheduler", True)
    return yaml.safe_dump(made, sort_keys=False)


TRTLLM_SERVE = ServerKind(
    "trtllm-serve",
    _words,
    {
        "tensor_parallelism": named("--tp_size"),
        "pipeline_parallelism": named("--pp_size"),
        "moe_expert_parallelism": named("--ep_size"),
        "kv_cache_free_gpu_mem_fraction": named("--kv_cache_free_gpu_memory_fraction"),
        "max_batch_size": named("--max_batch_size"),
        "max_num_tokens": named("--max_num_tokens"),
        "max_seq_len": named("--max_seq_len"),
        "enable_chunked_context": switch("--enable_chunked_prefill"),
    },
    always={"enable_kv_cache_reuse": False},  # which TensorRT-LLM does by default, and MLPerf forbids
    file=_file,
    in_file=("enable_kv_cache_reuse", "kv_cache_dtype"),
    binds_held_port=False,
    names_model=True,  # the folder's
    handover="disaggregated_params",
    takes_llm_args=True,
    install="install TensorRT-LLM, as in NVIDIA's containers",
)
