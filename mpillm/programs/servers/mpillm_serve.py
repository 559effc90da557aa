"""mpillm's own endpoint as a server: `python -m mpillm mpirun … serve`, with ranks of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from launch.command import Command
from launch.environment import SECRETS
from mpillm.programs.servers.kind import Option, ServerKind, Wanted, named


def _words(wanted: Wanted) -> Sequence[str]:
    ranks = 0 if wanted.role else 1  # a half has no control rank
    n = 1
    for name in ("tensor_parallelism", "pipeline_parallelism"):
        n *= wanted.values.get(name) or 1
    return (
        *(sys.executable, "-m", "mpillm", "mpirun", "-n", str(ranks + n), "serve"),
        *("--model_path", wanted.model, "--served_model_name", wanted.name),
        *("--host", wanted.host, "--port", str(wanted.port), "--log_dir", wanted.base),
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


MPILLM = ServerKind(
    "mpillm",
    _words,
    {name: _same(name) for name in _SAME},
    names_model=True,
    handover="disaggregated_params",
    half=lambda wanted: Command(("--server_role", wanted.role)),
    secret=SECRETS["kv_secret"],
)
