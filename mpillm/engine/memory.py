"""Whether a model fits the memory of its node, or of its GPUs: known before anything is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from disagg.errors import ConfigError
from mpillm.cores.base import CoreConfig
from mpillm.engine.layout import Layout
from mpillm.engine.quantization import held

if TYPE_CHECKING:
    from mpillm.engine.model_config import ModelConfig, ModelInfo

_GPU_OVERHEAD = 1 << 30  # bytes: CUDA's context, kernels, graphs, the libraries' own memory

# Limit, usage, and what of the usage is files that the system drops when memory is short; cgroups of version 2, then 1.
_CGROUP_FILES = {
    "": ("memory.max", "memory.current", ("inactive_file", "active_file")),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}


def check_fit(config: CoreConfig, info: ModelInfo) -> None:
    """ConfigError if the ranks of this node can't hold their parts of the model; to be asked before any of them loads.

    Nodes count as alike, and each rank as the one of its instance that holds the most.
    """
    weights = max(_load_bytes(info.config, stage, info.dtype, info.quantization) for stage in _stages(info.layout))
    # A KV cache of a given size is to be had in full. The default one is larger than one sequence, but takes memory only as it is used.
    tokens = info.max_seq_len if config.kv_cache_tokens is None else info.kv_cache_tokens
    kv_cache = tokens * info.config.kv_bytes_per_token(info.dtype, config.tp_size, config.pp_size)
    kind = info.dtype if info.quantization == "none" else info.quantization
    needed, available = (weights + kv_cache) * config.node_ranks, available_bytes()
    if needed > available:
        each = f"each of the {config.node_ranks} ranks on this node needs" if config.node_ranks > 1 else "it needs"
        together = f", {shown(needed)} together" if config.node_ranks > 1 else ""
        raise ConfigError(
            f"{config.model_path} does not fit: {each} {shown(weights + kv_cache)} of memory ({shown(weights)} to load the weights in "
            f"{kind}, {shown(kv_cache)} of KV cache for {tokens} tokens){together}, and {shown(available)} are available; "
            "spread it over more nodes (tensor or pipeline parallelism), or set a smaller --kv_cache_tokens or --max_seq_len"
        )


def gpu_room(config: CoreConfig, model: ModelConfig, dtype: str, quantization: str, there: int) -> int:
    """Bytes that the model leaves on each GPU of the instance, of `there`, for its KV cache; ConfigError if there are none.

    `quantization` is that of the weights as they are held.
    """
    width = 4 if dtype == "float32" else 2
    ranks = [(tp_rank, pp_rank) for tp_rank in range(config.tp_size) for pp_rank in range(config.pp_size)]
    layouts = [Layout(config.tp_size, config.pp_size, config.ep_size, *rank) for rank in ranks]
    weights = max(layout.n_bytes(model, width, quantization) for layout in layouts)
    heads = model.n_heads + 2 * max(model.n_kv_heads, config.tp_size)
    # A mixture has its feed-forward's values for each chosen expert, whoever holds it, and what comes out of each.
    n_chosen = model.n_experts_per_token if model.n_experts else 1
    inner = 3 * n_chosen * model.intermediate_size * config.ep_size
    per_row = (3 + n_chosen) * model.hidden_size + (2 * heads * model.head_dim + inner) // config.tp_size
    # Logits: as they come, and what sampling makes of them (float32, and sums in float64).
    step = width * per_row * max(config.max_num_tokens, config.max_batch_size) + 20 * model.vocab_size * config.max_batch_size
    room = there - weights - step - _GPU_OVERHEAD
    if room < config.tokens_per_block * model.kv_bytes_per_token(dtype, config.tp_size, config.pp_size):
        raise ConfigError(
            f"{config.model_path} does not fit: a GPU of instance {config.instance} has {shown(there)} free, and {shown(weights)}"
            f" of weights and {shown(step + _GPU_OVERHEAD)} for a step of max_num_tokens {config.max_num_tokens} and max_batch_size"
            f" {config.max_batch_size} leave no room for a KV cache (more GPUs for an instance: --tensor_parallelism)"
        )
    return room


def available_bytes(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """What this process can still get: of the node's memory, and within the control groups it is in (containers, Slurm jobs)."""
    return min([int(psutil.virtual_memory().available), *_cgroup_rooms(cgroups, own)])


def _stages(layout: Layout) -> list[Layout]:
    return [dataclasses.replace(layout, tp_rank=0, pp_rank=stage) for stage in range(layout.pp_size)]


def _load_bytes(model: ModelConfig, layout: Layout, dtype: str, quantization: str) -> int:
    """In memory at once while a rank loads: a matrix is there twice while it is packed (see `linear`), two of a layer as one.

    One that is rounded or widened on its way is there as float32 a few times.
    """
    sizes, width = layout.sizes(model), 4 if dtype == "float32" else 2
    tied = sizes["model.embed_tokens.weight"] if model.tie_word_embeddings and layout.is_last_stage else 0  # as rows, and packed
    under_way = 2 * width if quantization == "none" else 3 * 4
    return layout.n_bytes(model, width, held(quantization, on_gpu=False)) + tied * width + under_way * max(sizes.values())


def _cgroup_rooms(cgroups: Path, own: Path) -> Iterator[int]:
    """Of each control group around this process that limits memory: the limit less what is used and not just files read."""
    lines = own.read_text().splitlines() if own.is_file() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        version = "memory" if "memory" in controllers.split(",") else ""
        if controllers and not version:
            continue
        limit_file, usage_file, cached = _CGROUP_FILES[version]
        top = cgroups / version
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(top):
                break
            try:
                limit, usage = (folder / limit_file).read_text().strip(), int((folder / usage_file).read_text())
                counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            except OSError:  # the topmost group has no limit; in a container, groups outside of it are not seen
                continue
            if limit != "max":
                yield int(limit) - usage + sum(int(counts.get(name, 0)) for name in cached)


def shown(n_bytes: int) -> str:
    """For a person."""
    return f"{n_bytes / 2**30:.1f} GiB"
