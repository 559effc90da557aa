"""vLLM's OpenAI server: `vllm serve`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from launch.command import Command, KnownFailure
from mpillm.programs.servers.acceptance import check_length, number_of, value_of
from mpillm.programs.servers.kind import ServerKind, ServerSpec, named, switch
from mpillm.programs.servers.server_options import OptionSource

_SIDE_CHANNEL = "side_channel"
_SPECULATION = "--speculative-config"
_DRAFT_TOKENS = "num_speculative_tokens"
_KV_TRANSFER, _POLICY = "--kv-transfer-config", "kv_load_failure_policy"
_WATCHDOG = "--watchdog-config"
_MAX_STEP_S = 300  # vLLM's own default for a step that hangs
_KV_ROLES = {"context": "kv_producer", "generation": "kv_consumer"}


def _arguments(spec: ServerSpec) -> Sequence[str]:
    return (
        *("vllm", "serve", spec.model, "--served-model-name", spec.model_name),
        *("--host", spec.host, "--port", str(spec.port)),
    )


def _experts(value: Any) -> Sequence[str]:
    # Its expert parallel size equals the size of the tensor parallel group.
    return ("--enable-expert-parallel",) if value > 1 else ()


def _disagg(spec: ServerSpec) -> Command:
    # KV caches go over NIXL, also between CPUs; the servers connect by the side channel.
    kv = json.dumps({"kv_connector": "NixlConnector", "kv_role": _KV_ROLES[spec.role]})
    channel = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": spec.address,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(spec.more_ports[_SIDE_CHANNEL]),
    }
    return Command((_KV_TRANSFER, kv), channel)


def _no_transfer(context: ServerSpec, generation: ServerSpec, kv_heads: int | None) -> str:
    """Return why NixlConnector cannot transfer KV caches; "" if it can, or if the user has another connector.

    The checks of vLLM 0.32 and 0.33: `TransferTopology.tp_ratio`, and in `nixl/base_worker.py` `__init__` and
    `_validate_remote_agent_handshake`. A generation server checks at its first request.
    """
    own = value_of(generation.args, _KV_TRANSFER)
    if own and "Nixl" not in own[1]:
        return ""
    tp, gen_tp = (one.values.get("tensor_parallelism", 1) for one in (context, generation))
    sizes = f"--ctx_tp_size {tp} and --gen_tp_size {gen_tp}"
    if generation.values.get("pipeline_parallelism", 1) > 1:
        why = "--gen_pp_size must be 1"
    elif max(tp, gen_tp) % min(tp, gen_tp):
        why = f"one of {sizes} must be a multiple of the other"
    elif kv_heads is not None and tp > max(gen_tp, kv_heads):
        why = f"{sizes} cannot share {kv_heads} KV heads; lower --ctx_tp_size to {max(gen_tp, kv_heads)}"
    else:
        return ""
    return f"vLLM's NixlConnector (0.32, 0.33): {why}"


def _multi_node(spec: ServerSpec) -> Command:
    node = spec.node
    args = ["--nnodes", str(node.n), "--node-rank", str(node.number)]
    args += ["--master-addr", node.first_host, "--master-port", str(node.first_port)]
    # Its queues between nodes listen there.
    return Command((*args, *(["--headless"] if node.number else [])), {"VLLM_HOST_IP": spec.address})


def _fix_acceptance(spec: ServerSpec, length: float) -> Command:
    """Add the length to the configuration of vLLM's `SpeculativeConfig` (vllm/config/speculative.py).

    The definition is mpillm's. Only the rejection sampling `synthetic` reads it.
    """
    more = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}
    at = value_of(spec.args, _SPECULATION) or value_of(spec.args, "-sc")
    if at is None:
        return Command(_with_keys(spec.args, more, length))
    index, text = at
    try:
        config = json.loads(text)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise ValueError(f"has no JSON object in its {_SPECULATION}") from None
    check_length(length, number_of(config.get(_DRAFT_TOKENS)))
    flag, equals, _ = spec.args[index].partition("=")
    new = json.dumps(config | more)
    after = spec.args[index + (1 if equals else 2) :]
    return Command((*spec.args[:index], *([f"{flag}={new}"] if equals else [flag, new]), *after))


def _with_keys(args: Sequence[str], more: dict[str, Any], length: float) -> tuple[str, ...]:
    """Return arguments with keys as separate flags: ``--speculative-config.method ngram``."""
    prefix = f"{_SPECULATION}."
    if not any(arg.replace("_", "-").startswith(prefix) for arg in args):
        raise ValueError(f"has no draft tokens; add {_SPECULATION} to --server_args")
    n_draft = value_of(args, prefix + _DRAFT_TOKENS.replace("_", "-"))
    check_length(length, number_of(n_draft[1]) if n_draft else None)
    return (*args, *(text for key, value in more.items() for text in (prefix + key, str(value))))


def _profiler(spec: ServerSpec) -> Command:
    """Name the folder of its traces, unless the user has set its profiler."""
    if any(arg.replace("_", "-").startswith("--profiler-config") for arg in spec.args):
        return Command(())
    config = {"profiler": "torch", "torch_profiler_dir": str(spec.profile_folder)}
    return Command(("--profiler-config", json.dumps(config)))


def _watchdog(spec: ServerSpec) -> Command:
    """Let it write the stacks of a step that hangs, before mpillm ends the run. It also does so when it ends.

    Each of its engines and workers has a thread for it: see vllm/utils/watch_dog.py.
    """
    is_set = any(arg.replace("_", "-").startswith(_WATCHDOG) for arg in spec.args)
    if is_set or spec.release is None or not spec.release.has(_WATCHDOG):
        return Command(())
    timeout_s = int(min(max(spec.stall_s / 2, 1), _MAX_STEP_S))
    config = {"dump_dir": str(spec.stacks_folder), "timeout": timeout_s, "check_interval": min(timeout_s, 10)}
    return Command((_WATCHDOG, json.dumps(config)))


def _notes(spec: ServerSpec) -> Sequence[str]:
    """Return a line if a prompt whose KV cache does not arrive is computed again, without an error."""
    text = " ".join(spec.args).replace("-", "_")
    if spec.role != "generation" or not re.search(rf"{_POLICY}\W{{1,9}}recompute\b", text):
        return ()
    return (
        f"--server_args: {_POLICY} recompute: generation servers compute a prompt again if its KV cache does"
        " not arrive; a test with such prompts is INVALID",
    )


# From the wheels of 0.14, 0.20, 0.24, 0.28, 0.32 and 0.33: the first of these with the change.
_OPTIONS = OptionSource(
    package="vllm",
    files=("engine/arg_utils.py", "entrypoints/**/cli_args.py", "entrypoints/cli/*.py"),
    is_flexible=True,
    removed={
        "0.14": {"--task": "--runner"},
        "0.20": {
            "--disable-log-requests": "--no-enable-log-requests",
            "--swap-space": "",
            "--disable-frontend-multiprocessing": "",
        },
        "0.28": {
            "--max-num-partial-prefills": "",
            "--max-long-partial-prefills": "",
            "--calculate-kv-scales": "",
            "--override-attention-dtype": "",
        },
        "0.32": {"--enable-bf16x3-router-gemm": ""},
    },
    deprecated={
        "0.32": {
            "--log-config-file": "--logging-config.pylogging_config_file",
            "--disable-cascade-attn": "",
        },
        "0.33": {
            "--mamba-cache-mode": "",
            "--ir-op-priority": "",
        },
    },
)


VLLM = ServerKind(
    name="vllm",
    arguments=_arguments,
    options={
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
    disagg_protocol="kv_transfer_params",
    disagg=_disagg,
    disagg_ports=(_SIDE_CHANNEL,),
    no_transfer=_no_transfer,
    multi_node=_multi_node,
    reset_route=lambda spec: Command((), {"VLLM_SERVER_DEV_MODE": "1"}),
    profiler=_profiler,
    fix_acceptance=_fix_acceptance,
    by_release=_watchdog,
    option_source=_OPTIONS,
    notes=_notes,
    acceptance_setting="synthetic_acceptance",
    install="pip install vllm, or activate the environment that has it",
)
