"""SGLang's OpenAI server: `sglang serve`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launch.command import Command, KnownFailure
from mpillm.programs.servers.acceptance import check_length, number_of, value_of
from mpillm.programs.servers.kind import ServerKind, ServerSpec, named, switch
from mpillm.programs.servers.server_options import OptionSource

_BOOTSTRAP = "bootstrap"
_MODES = {"context": "prefill", "generation": "decode"}
_ATTENTION_DP = ("--attn-dp-size", "--enable-dp-attention")
_DECODE_CACHE = "--disaggregation-decode-enable-radix-cache"


def _arguments(spec: ServerSpec) -> Sequence[str]:
    return (
        *("sglang", "serve", "--model-path", spec.model),
        *("--served-model-name", spec.model_name, "--host", spec.host, "--port", str(spec.port)),
        "--enable-metrics",
    )


def _chunks(value: Any) -> Sequence[str]:
    return () if value else ("--chunked-prefill-size", "-1")


def _multi_node(spec: ServerSpec) -> Command:
    node = spec.node
    args = ("--nnodes", str(node.n), "--node-rank", str(node.number))
    return Command((*args, "--dist-init-addr", f"{node.first_host}:{node.first_port}"))


def _disagg(spec: ServerSpec) -> Command:
    # Only context servers listen for others, at the port of their registry.
    port = ("--disaggregation-bootstrap-port", str(spec.more_ports[_BOOTSTRAP]))
    return Command(("--disaggregation-mode", _MODES[spec.role], *(port if spec.role == "context" else ())))


def _no_transfer(context: ServerSpec, generation: ServerSpec, kv_heads: int | None) -> str:
    """Return why KV caches cannot be transferred; "" if they can.

    The checks of SGLang 0.5.23 in `disaggregation/common/conn.py`. A generation server checks at its first
    request.
    """
    (tp, pp), (gen_tp, gen_pp) = (
        [one.values.get(name, 1) for name in ("tensor_parallelism", "pipeline_parallelism")]
        for one in (context, generation)
    )
    dtypes = [one.values.get("kv_cache_dtype", "auto") for one in (context, generation)]
    has_attention_dp = any(arg.startswith(_ATTENTION_DP) for arg in (*context.args, *generation.args))
    if gen_pp not in (1, pp):
        why = f"--gen_pp_size must be 1, or --ctx_pp_size {pp}"
    elif max(tp, gen_tp) % min(tp, gen_tp) and not has_attention_dp:  # it divides the tensor parallel ranks
        why = f"one of --ctx_tp_size {tp} and --gen_tp_size {gen_tp} must be a multiple of the other"
    elif dtypes[0] != dtypes[1]:
        why = f"--kv_cache_dtype is {dtypes[0]} for context, {dtypes[1]} for generation servers"
    else:
        return ""
    return f"SGLang (0.5.23): {why}"


def _notes(spec: ServerSpec) -> Sequence[str]:
    """Return a line if a prefix cache that is switched on stays off."""
    is_on = spec.role == "generation" and spec.values.get("enable_kv_cache_reuse")
    if not is_on or _DECODE_CACHE in spec.args:
        return ()
    return (
        "--enable_kv_cache_reuse: SGLang's generation servers have no prefix cache; --server_args="
        f"{_DECODE_CACHE} switches it on",
    )


_ACCEPTANCE = "SGLANG_SIMULATE_ACC"


def _fix_acceptance(spec: ServerSpec, length: float) -> Command:
    """Set the variables of python/sglang/srt/speculative/spec_utils.py: their length is mpillm's.

    The method `match-expected` has this mean; `multinomial` clips a normal distribution. The server draws
    once for all requests of a step.
    """
    if value_of(spec.args, "--speculative-algorithm") is None:
        raise ValueError("has no draft tokens; add --speculative-algorithm to --server_args")
    if (steps := value_of(spec.args, "--speculative-num-steps")) is not None:
        check_length(length, number_of(steps[1]))
    elif (tokens := value_of(spec.args, "--speculative-num-draft-tokens")) is not None:
        n_verified = number_of(tokens[1])  # it counts the token before the draft
        check_length(length, None if n_verified is None else n_verified - 1)
    variables = {"LEN": f"{length:.12g}", "METHOD": "match-expected", "TOKEN_MODE": "real-draft-token"}
    return Command(spec.args, {f"{_ACCEPTANCE}_{name}": value for name, value in variables.items()})


# From the wheels of all releases from 0.5.14 to 0.5.23.
_OPTIONS = OptionSource(
    package="sglang",
    files=("srt/server_args.py", "srt/arg_groups/**/*.py", "cli/*.py"),
    removed={
        "0.5.16": {
            "--enable-deepep-waterfill": "",
            "--optimistic-prefill-retries": "",
        },
        "0.5.18": {"--torchao-config": ""},
        "0.5.20": {
            "--cuda-graph-bs": "--cuda-graph-bs-decode",
            "--cuda-graph-max-bs": "--cuda-graph-max-bs-decode",
            "--disable-piecewise-cuda-graph": "--cuda-graph-backend-prefill=disabled",
            "--enable-breakable-cuda-graph": "--cuda-graph-backend-prefill=breakable",
            "--enforce-piecewise-cuda-graph": "--cuda-graph-backend-prefill=tc_piecewise",
            "--piecewise-cuda-graph-compiler": "",
            "--piecewise-cuda-graph-max-tokens": "--cuda-graph-max-bs-prefill",
            "--piecewise-cuda-graph-tokens": "--cuda-graph-bs-prefill",
            **dict.fromkeys(
                (
                    "--enable-prefill-context-parallel",
                    "--enable-nsa-prefill-context-parallel",
                    "--enable-dsa-prefill-context-parallel",
                ),
                "--enable-prefill-cp",
            ),
            **dict.fromkeys(
                ("--prefill-cp-mode", "--nsa-prefill-cp-mode", "--dsa-prefill-cp-mode"),
                "--cp-strategy",
            ),
            "--nsa-decode-backend": "--dsa-decode-backend",
            "--nsa-prefill-backend": "--dsa-prefill-backend",
            "--mamba-scheduler-strategy": "--mamba-radix-cache-strategy",
            "--enable-gdn-replayssm-spec": "--enable-linear-replayssm-spec",
            "--speculative-dflash-draft-window-size": "--speculative-draft-window-size",
            "--enable-expert-distribution-metrics": "--expert-balancedness-report-mode",
            "--stream-output": "--incremental-streaming-output",
            "--collect-tokens-histogram": "",
            "--prefill-round-robin-balance": "",
            "--custom-sigquit-handler": "",
            "--stat-loggers": "",
        },
        "0.5.21": {
            "--elastic-ep-rejoin": "--elastic-ep-join-mode=recover",
            "--keep-mm-feature-on-device": "--mm-feature-transport=cuda_ipc",
        },
        "0.5.22": {"--cuda-graph-tc-compiler": ""},
        "0.5.23": {"--speculative-skip-dp-mlp-sync": ""},
    },
    deprecated={
        "0.5.14": {
            "--disable-cuda-graph": "--cuda-graph-backend-decode=disabled and"
            " --cuda-graph-backend-prefill=disabled",
            "--enable-flashinfer-allreduce-fusion": "--flashinfer-allreduce-fusion-backend=auto",
        },
        "0.5.16": {"--grpc-mode": "--smg-grpc-mode"},
        "0.5.18": {"--disable-fast-image-processor": "--image-processor-backend=pil"},
        "0.5.22": {"--enable-dp-attention": "--attn-dp-size N instead of it and of --dp-size N"},
        "0.5.23": {"--monokernel-backend": "--enable-amd-monokernel"},
    },
)


SGLANG = ServerKind(
    name="sglang",
    arguments=_arguments,
    options={
        "tensor_parallelism": named("--tp-size"),
        "pipeline_parallelism": named("--pp-size"),
        "moe_expert_parallelism": named("--ep-size"),
        "load_format": named("--load-format"),
        "dtype": named("--dtype"),
        "quantization": named("--quantization", fp8="fp8"),
        "kv_cache_dtype": named("--kv-cache-dtype", auto="auto", bfloat16="bfloat16", fp8="fp8_e4m3"),
        "kv_cache_free_gpu_mem_fraction": named("--mem-fraction-static"),
        "max_batch_size": named("--max-running-requests"),
        "max_num_tokens": lambda n: ("--max-prefill-tokens", str(n), "--chunked-prefill-size", str(n)),
        "max_seq_len": named("--context-length"),
        "enable_kv_cache_reuse": switch(off="--disable-radix-cache"),
        "enable_chunked_context": _chunks,
    },
    always={"enable_kv_cache_reuse": False},  # SGLang's default is True, which MLPerf forbids
    failures=(
        KnownFailure(
            r"Not enough memory. Please try to increase --mem-fraction-static",
            "its KV cache gets no memory beside the weights",
            "raise --kv_cache_free_gpu_mem_fraction or --tensor_parallelism",
        ),
        KnownFailure(
            r"Capture .{0,200}[Gg]raph failed",
            "its graphs could not be captured, most often for want of GPU memory",
            "lower --kv_cache_free_gpu_mem_fraction, or add --cuda-graph-backend-decode=disabled (for prompts"
            " --cuda-graph-backend-prefill=disabled) to --server_args",
        ),
        KnownFailure(
            r"[Pp]lease install mooncake|No module named 'mooncake",
            "it has no Mooncake, which transfers its KV caches",
            "pip install mooncake-transfer-engine where SGLang is, or add"
            " --disaggregation-transfer-backend nixl to --server_args",
        ),
        KnownFailure(
            r"[Pp]lease install NIXL|No module named 'nixl",
            "it has no NIXL, which transfers its KV caches",
            "pip install nixl where SGLang is",
        ),
    ),
    names_model=True,
    multi_node=_multi_node,
    profiler=lambda spec: Command((), {"SGLANG_TORCH_PROFILER_DIR": str(spec.profile_folder)}),
    fix_acceptance=_fix_acceptance,
    acceptance_setting=_ACCEPTANCE,
    option_source=_OPTIONS,
    install="pip install sglang, or activate the environment that has it",
    disagg_protocol="bootstrap_room",
    disagg=_disagg,
    disagg_ports=(_BOOTSTRAP,),
    no_transfer=_no_transfer,
    notes=_notes,
)
