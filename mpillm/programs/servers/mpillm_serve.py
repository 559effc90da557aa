"""mpillm's own endpoint as a server: `python -m mpillm mpirun … serve`, with ranks of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from launch.command import Command
from launch.environment import SECRETS
from mpillm.programs.servers.acceptance import OPTION, value_of
from mpillm.programs.servers.kind import Option, ServerKind, ServerSpec, named


def _arguments(spec: ServerSpec) -> Sequence[str]:
    ranks = 0 if spec.role else 1  # context and generation servers have no control rank
    n = 1
    for name in ("tensor_parallelism", "pipeline_parallelism"):
        n *= spec.values.get(name) or 1
    return (
        *(sys.executable, "-m", "mpillm", "mpirun", "-n", str(ranks + n), "serve"),
        *("--model_path", spec.model, "--served_model_name", spec.model_name),
        *("--host", spec.host, "--port", str(spec.port), "--log_dir", str(spec.base)),
    )


_SAME = (
    *("tensor_parallelism", "pipeline_parallelism", "moe_expert_parallelism", "load_format", "dtype"),
    *("quantization", "kv_cache_dtype", "device", "max_batch_size", "max_num_tokens", "max_seq_len"),
    *("kv_cache_tokens", "kv_cache_free_gpu_mem_fraction", "tokens_per_block", "enable_chunked_context"),
    *("context_chunking_policy", "batch_scheduler_policy", "enable_kv_cache_reuse", "num_threads"),
)


def _same(name: str) -> Option:
    flag = named(f"--{name}")
    return lambda value: flag(str(value).lower() if isinstance(value, bool) else value)


def _fix_acceptance(spec: ServerSpec, length: float) -> Command:
    if value_of(spec.args, "--speculative-config") is None:
        raise ValueError("has no draft tokens; add --speculative_config to --server_args")
    return Command((*spec.args, f"--{OPTION}", f"{length:.12g}"))


MPILLM = ServerKind(
    name="mpillm",
    arguments=_arguments,
    options={name: _same(name) for name in _SAME},
    names_model=True,
    disagg_protocol="disaggregated_params",
    disagg=lambda spec: Command(("--server_role", spec.role)),
    secret=SECRETS["kv_secret"],
    reset_route=lambda spec: Command(("--reset_prefix_cache",)),
    fix_acceptance=_fix_acceptance,
    acceptance_setting=OPTION,
)
