"""Memory and GPUs of a plan, before the run starts: required memory, whether it fits, and idle GPUs."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from disagg import WorldPlan
from disagg.errors import ConfigError
from disagg.plan_table import ranges
from mpillm.core_names import DEFAULT
from mpillm.cores.base import CoreConfig
from mpillm.cores.registry import BackendRegistry
from mpillm.devices import Gpu, assign
from mpillm.options.run_config import RunConfig
from mpillm.runtime.core_configs import check_handoff, core_configs

if TYPE_CHECKING:
    from mpillm.engine.shape.engine_config import EngineConfig
    from mpillm.engine.shape.model_info import ModelInfo


def idle_gpus(
    plan: WorldPlan, seen: Sequence[tuple[Gpu, ...]], gpus: Mapping[int, Sequence[int]]
) -> list[str]:
    """Return a line for each node with unused GPUs, if ranks use GPUs.

    `seen`: visible GPUs of each rank; `gpus`: GPUs that a rank or its server uses, by rank.
    """
    used = {seen[rank][device].uuid for rank, devices in gpus.items() for device in devices}
    on_node: dict[str, list[str]] = {}  # UUIDs by node, in the order of the node's first rank
    for rank in plan.ranks:
        uuids = on_node.setdefault(rank.node, [])
        uuids += [gpu.uuid for gpu in seen[rank.rank] if gpu.uuid not in uuids]
    lines = []
    for node, uuids in on_node.items():
        if gpus and (idle := [i for i, uuid in enumerate(uuids) if uuid not in used]):
            which = f"GPUs {ranges(idle, ', ')}" if len(idle) > 1 else f"GPU {idle[0]}"
            lines.append(f"no rank takes {which} of {node}: idle in this run")
    return lines


def memory_lines(config: RunConfig, plan: WorldPlan) -> list[str]:
    """Return lines on the memory of each instance's ranks, and whether it fits this machine.

    The fit is checked only if all ranks would run on this host. Only the embedded engine's memory is known.
    For every core, a line states why a run would refuse the model's tokenizer or its folder.
    """
    if not config.model_path:
        return []
    if config.core_type != DEFAULT:
        refused = _tokenizer_refusal(config)
        return [_REFUSED.format(refused)] if refused else []
    from mpillm.engine.shape.model_info import model_info  # slow to import, and few plans name a model

    core_class = BackendRegistry.get(DEFAULT)
    here = {rank.node for rank in plan.ranks} <= {"localhost", socket.gethostname()}
    seen = [core_class.gpus() if here and core_class.uses_gpus else () for _ in plan.ranks]
    root_ranks = [instance.root_rank for instance in plan.instances]
    by_need: dict[str, list[int]] = {}
    refused = ""  # the first error, which would end a run
    idle: list[str] = []
    try:
        gpus = assign(config.device if here else "cpu", plan, seen)
        idle = idle_gpus(plan, seen, {rank: (gpu.device,) for rank, gpu in gpus.items()})
    except ConfigError as error:
        gpus = {}
        refused = str(error)
    cores = core_configs(config, plan, root_ranks, gpus)
    models: list[object] = []
    for instance, core in zip(plan.instances, cores, strict=True):
        try:
            with config.explained():
                info = model_info(core.engine)
                by_need.setdefault(_needs(info, core.engine), []).append(instance.index)
                if here and not refused:
                    models.append(core_class.check(core))
        except ConfigError as error:
            refused = refused or str(error)
    if here and not refused:
        try:
            check_handoff(cores, models)
        except ConfigError as error:
            refused = str(error)
    refused = refused or _tokenizer_refusal(config)
    lines = [f"memory: {_instances(some)} {need}" for need, some in by_need.items()]
    return [*lines, *idle, *([_REFUSED.format(refused)] if refused else [])]


_REFUSED = "here a run would be refused: {}"


def _tokenizer_refusal(config: RunConfig) -> str:
    """Return why a run would refuse the tokenizer or its folder; "" if it would not."""
    from mpillm.runtime.choose_samples import check_tokenizer  # few plans name a model

    try:
        with config.explained():
            check_tokenizer(config)
    except ConfigError as error:
        return str(error)
    return ""


def share_lines(cores: Sequence[CoreConfig]) -> list[str]:
    """Return a line for each role whose instances differ in their number of simultaneous requests.

    The line contains each instance's share of the open requests. `cores`: one core of each instance.
    """
    lines = []
    for role in dict.fromkeys(core.role for core in cores):
        sizes: dict[int, list[int]] = {}  # instances, by number of simultaneous requests
        for core in cores:
            if core.role == role:
                sizes.setdefault(core.engine.scheduler.max_batch_size, []).append(core.instance)
        total = sum(size * len(some) for size, some in sizes.items())
        shares = [
            f"instance{'s' if len(some) > 1 else ''} {ranges(some, ', ')} {100 * size / total:.0f} %"
            f"{' each' if len(some) > 1 else ''} (max_batch_size {size})"
            for size, some in sizes.items()
        ]
        if len(sizes) > 1:
            lines.append(
                f"shares of the open requests: {', '.join(shares)}; faster instances get more in total"
            )
    return lines


def _instances(some: Sequence[int]) -> str:
    return f"a rank of instance{'s' if len(some) > 1 else ''} {ranges(some, ', ')}"


def _needs(info: ModelInfo, engine: EngineConfig) -> str:
    per_token = info.config.kv_bytes_per_token(info.kv_dtype, engine.tp_size, engine.pp_size)
    text = (
        f"holds {_size_text(info.n_bytes)} of weights, and {_size_text(per_token)} of KV cache for each token"
    )
    if info.host_blocks:
        text += f", and keeps {info.host_blocks * engine.scheduler.tokens_per_block:,} tokens in host memory"
    # If no size is known, the cache takes the free memory of the GPU.
    tokens = info.kv_cache_tokens if engine.gpu_bytes or engine.kv_cache_tokens else None
    if tokens is None:
        return text
    n_bytes = per_token * tokens
    if info.window_cache_tokens:  # some layers have a smaller cache
        of_layer = info.config.kv_bytes_per_token(info.kv_dtype, engine.tp_size, info.config.n_layers)
        n_layers = info.config.kv_layers(engine.pp_size, windowed=True)
        n_bytes -= n_layers * of_layer * (tokens - info.window_cache_tokens)
    return f"{text}, {_size_text(n_bytes)} for {tokens:,}"


def _size_text(n_bytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.4g} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} GiB"
