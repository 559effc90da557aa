"""From the plan to the configurations of cores, and to the YAML that holds them; without MPI."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from disagg import DisaggConfig, ServerConfig, WorldPlan
from disagg.errors import ConfigError
from mpillm.cores.base import ClientConfig, CoreConfig
from mpillm.cores.registry import BackendRegistry
from mpillm.devices import OwnGpu
from mpillm.engine.shape.engine_config import EngineConfig
from mpillm.options.disagg_values import CORE, ROUTER, written
from mpillm.options.flags import check_limits
from mpillm.options.run_config import RunConfig
from mpillm.programs.servers.kinds import kind_of

CORE_ROLES = {"ctx": "context", "gen": "generation", "executor": "executor"}


def core_configs(
    config: RunConfig, plan: WorldPlan, ranks: Iterable[int], gpus: Mapping[int, OwnGpu]
) -> list[CoreConfig]:
    """Return the core's configuration for each of `ranks`, all workers; `gpus`: see `devices.assign`."""
    workers = Counter(rank.node for rank in plan.ranks if rank.instance is not None)
    return [_core_config(config, plan, rank, gpus, workers[plan.ranks[rank].node]) for rank in ranks]


def with_settings(config: RunConfig, plan: WorldPlan, cores: Sequence[CoreConfig]) -> list[CoreConfig]:
    """Add the settings that the core class reads from the options. ConfigError: see `LLMCore.settings`."""
    core_class = BackendRegistry.get(config.core_type)
    sections = [plan.instances[core.instance].section for core in cores]
    settings = {
        section: core_class.settings(config.in_section(section)) for section in dict.fromkeys(sections)
    }
    return [replace(core, settings=settings[section]) for core, section in zip(cores, sections, strict=True)]


def check_flags(config: RunConfig, plan: WorldPlan) -> None:
    """Raise ConfigError if runtime flags exceed limits that the build flags set."""
    for section in dict.fromkeys(instance.section for instance in plan.instances):
        of = config.in_section(section)
        with of.explained():
            check_limits(of.trtllm_runtime_flags, of.trtllm_build_flags, "trtllm_build_flags")


def check_handoff(cores: Iterable[CoreConfig], models: Iterable[object]) -> None:
    """Raise ConfigError if context and generation instances would hold KV caches of different types.

    `models`: result of `LLMCore.check` for each of `cores`.
    """
    dtypes = dict.fromkeys(
        (core.role, dtype)
        for core, model in zip(cores, models, strict=True)
        if core.role != "executor" and (dtype := getattr(model, "kv_dtype", None))
    )
    if len({dtype for _, dtype in dtypes}) > 1:
        kinds = " and ".join(f"{role} instances have a KV cache in {dtype}" for role, dtype in dtypes)
        raise ConfigError(
            f"{kinds}: the handoff does not convert it, so --dtype and --kv_cache_dtype,"
            " or dtype and kv_cache_config.dtype of both sections, must be the same",
            about=["dtype", "kv_cache_dtype"],
        )


def effective_yaml(
    config: RunConfig, yaml: DisaggConfig, plan: WorldPlan, cores: Iterable[CoreConfig]
) -> DisaggConfig:
    """Return `yaml` with the resolved values. A generated `yaml` also gets the hosts of `plan`.

    `cores`: at least one core of each section.
    """
    if config.yaml is None and len({rank.node for rank in plan.ranks}) > 1:
        from disagg import with_hosts  # slow to import, and most ranks need nothing else from that file

        hosts = [plan.ranks[instance.root_rank].node for instance in plan.instances]
        yaml = with_hosts(yaml, plan.ranks[plan.leader_rank].node, hosts)
    of_section = {plan.instances[core.instance].section: core for core in cores}

    def in_force(section: str, server: ServerConfig) -> ServerConfig:
        engine = of_section[section].engine
        values = {place: engine.values[place.field.name] for place in CORE}
        return written(server, {**values, ROUTER: config.in_section(section).traffic_distribution_policy})

    return replace(yaml.with_sections(in_force), model=config.model_path)


def _core_config(
    config: RunConfig, plan: WorldPlan, rank: int, gpus: Mapping[int, OwnGpu], node_ranks: int
) -> CoreConfig:
    """Return the configuration of a rank's core. `node_ranks`: number of worker ranks on the rank's node."""
    own, gpu = plan.ranks[rank], gpus.get(rank)
    instance = next(instance for instance in plan.instances if rank in instance.ranks)
    node_ranks = config.instance_run.node_ranks if config.instance_run else node_ranks
    config = config.in_section(instance.section)
    engine = EngineConfig.of(
        config.values,
        role=CORE_ROLES[instance.role],
        instance=instance.index,
        tp_size=instance.tp_size,
        pp_size=instance.pp_size,
        ep_size=instance.ep_size,
        tp_rank=own.tp_rank or 0,
        pp_rank=own.pp_rank or 0,
        gpu=gpu.device if gpu else None,
        gpu_bytes=gpu.free if gpu else None,
        n_threads=config.num_threads or _thread_share(node_ranks),
        node_ranks=node_ranks,
    )
    return CoreConfig(
        core_type=config.core_type,
        engine=engine,
        rank=rank,
        n_instances=sum(other.role == instance.role for other in plan.instances),
        client=_client_config(config, plan, instance.index, own.server),
        resets_prefix_cache=config.reset_prefix_cache,
    )


def _client_config(config: RunConfig, plan: WorldPlan, instance: int, server: int | None) -> ClientConfig:
    kind = kind_of(config.server) if config.server else None
    clients_per_server = plan.clients_per_server or 1
    return ClientConfig(
        server=server,
        names_model=kind is not None and kind.names_model,
        server_wait_s=None if config.is_user_set("load_deadline") else _SERVER_WAIT_S,
        first_token_wait_s=None if config.is_user_set("health_deadline") or kind else _FIRST_TOKEN_WAIT_S,
        index=instance % clients_per_server,
        n_clients=clients_per_server,
        restarts=config.on_instance_loss == "restart",
        context_servers=tuple(range(plan.n_context_servers)),
        profiler_stop_s=config.drain_deadline / 2 if config.profile else None,
        protocol=kind.disagg_protocol if kind and plan.n_context_servers else "",
    )


_SERVER_WAIT_S = 60.0  # servers that the run does not start usually run already
_FIRST_TOKEN_WAIT_S = 30.0


def _thread_share(node_ranks: int) -> int:
    """Return this rank's share of its node's CPU cores, or all to which its launcher has bound it."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if allowed < (os.cpu_count() or 1):
        return allowed
    return max(1, allowed // node_ranks)
