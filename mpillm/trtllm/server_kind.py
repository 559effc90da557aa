"""TensorRT-LLM's `trtllm-serve`. The arguments come from its sources and are not tested against it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from launch.command import Command, KnownFailure
from mpillm.programs.servers.acceptance import check_length, number_of
from mpillm.programs.servers.kind import ServerKind, ServerSpec, named, switch
from mpillm.programs.servers.server_options import OptionSource, Release
from mpillm.trtllm.over_nodes import OVER_NODES

_CONFIG, _OLD_CONFIG = "--config", "--extra_llm_api_options"


def config_option(release: Release | None) -> str:
    """Return the name of the option for a YAML of LLM arguments; `release`: the installed one, if known.

    1.2 added --config, and keeps the old name, which is the only one before.
    """
    return _CONFIG if release is not None and release.has(_CONFIG) else _OLD_CONFIG


def _arguments(spec: ServerSpec) -> Sequence[str]:
    return (
        *("trtllm-serve", "serve", spec.model, "--host", spec.host, "--port", str(spec.port)),
        *(config_option(spec.release), f"{spec.base}.yaml"),
    )


def _file(spec: ServerSpec, values: Mapping[str, Any]) -> str:
    """Return `LlmArgs` as YAML: the server's section, and arguments without a command-line option."""
    cache = {**spec.llm_args.get("kv_cache_config", {})}
    cache["enable_block_reuse"] = values["enable_kv_cache_reuse"]
    if "kv_cache_dtype" in values:
        cache["dtype"] = values["kv_cache_dtype"]
    args = {**spec.llm_args, "kv_cache_config": cache, "enable_iter_perf_stats": True}
    if "speculative_config" in values:
        args["speculative_config"] = dict(values["speculative_config"])
    if spec.role:  # TensorRT-LLM needs it for the handoff
        args.setdefault("cache_transceiver_config", {"backend": "DEFAULT"})
    if spec.role == "context":  # TensorRT-LLM has no overlap scheduler for this role
        args.setdefault("disable_overlap_scheduler", True)
    return yaml.safe_dump(args, sort_keys=False)


def _notes(spec: ServerSpec) -> Sequence[str]:
    """Return a line if the user's file replaces mpillm's: trtllm-serve reads the last one only."""
    names = (name for name in (_CONFIG, _OLD_CONFIG) for arg in spec.args if arg.split("=")[0] == name)
    if (name := next(names, "")) == "":
        return ()
    return (
        f"--server_args: {name}: trtllm-serve ignores mpillm's file, which sets enable_block_reuse: false",
    )


_ACCEPTANCE = "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"
_DRAFT_TOKENS = ("max_draft_len", "num_nextn_predict_layers")


def _fix_acceptance(spec: ServerSpec, length: float) -> Command:
    """Set the variable of tensorrt_llm/_torch/speculative/interface.py.

    It counts draft tokens only, so it is one less than mpillm's length, and 0 means that it is not set.
    """
    config = spec.values.get("speculative_config") or spec.llm_args.get("speculative_config")
    if not isinstance(config, Mapping):
        raise ValueError("has no draft tokens; set --speculative_config")
    if length == 1:
        raise ValueError("cannot reject all draft tokens; set a length above 1")
    check_length(length, next((number_of(config[name]) for name in _DRAFT_TOKENS if name in config), None))
    return Command(spec.args, {_ACCEPTANCE: f"{length - 1:.12g}"})


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
    in_file=("enable_kv_cache_reuse", "kv_cache_dtype", "speculative_config"),
    binds_reserved_port=False,
    names_model=True,  # the folder's
    disagg_protocol="disaggregated_params",
    launcher=OVER_NODES,
    failures=(
        KnownFailure(
            r"Permission denied \(publickey|Host key verification failed|ssh: connect to host|"
            r"ssh: Could not resolve|to reliably start one or more daemons|A daemon failed to report back",
            "mpirun cannot start processes on the other hosts of the server",
            "allow ssh between the hosts without a password, or start the server by hand and pass --url",
        ),
    ),
    takes_llm_args=True,
    fix_acceptance=_fix_acceptance,
    acceptance_setting=_ACCEPTANCE,
    option_source=OptionSource("tensorrt_llm", ("commands/*serve*.py",), min_names=20),  # 0.20 has 24
    notes=_notes,
    install="install TensorRT-LLM, as in NVIDIA's containers",
)
