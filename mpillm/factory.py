"""From the plan to the roles of one rank."""

from __future__ import annotations

import os
from collections.abc import Callable

from disagg import WorldPlan
from mpillm.comms.transport import Transport
from mpillm.comms.world import Communicators, route_ranks
from mpillm.config import RunConfig
from mpillm.cores import BackendRegistry, CoreConfig, LLMCore
from mpillm.planning import Setup, server_value
from mpillm.roles.base import Role, RouteMap
from mpillm.roles.ctx import Context
from mpillm.roles.executor import Executor
from mpillm.roles.gen import Generation
from mpillm.roles.leader import Leader

_SERVER_VALUES = ("max_batch_size", "max_num_tokens", "max_seq_len")  # where nobody says, CoreConfig does
_CORE_ROLES = {"ctx": "context", "gen": "generation", "executor": "executor"}


def core_config(config: RunConfig, plan: WorldPlan, rank: int, gpu_bytes: dict[int, int]) -> CoreConfig:
    """What the core on `rank` (of an instance) is built from; `gpu_bytes`: see `devices.assign`."""
    me = plan.ranks[rank]
    assert me.instance is not None
    instance = plan.instances[me.instance]
    server = instance.server
    kv_cache = server.kv_cache_config or {}
    return CoreConfig(
        core_type=config.core_type,
        role=_CORE_ROLES[instance.role],
        instance=instance.index,
        tp_size=instance.tp_size,
        pp_size=instance.pp_size,
        ep_size=instance.ep_size,
        tp_rank=me.tp_rank or 0,
        pp_rank=me.pp_rank or 0,
        ep_rank=me.ep_rank or 0,
        rank=rank,
        device=me.device,
        gpu_bytes=gpu_bytes.get(instance.index),
        n_threads=config.num_threads or _thread_share(plan, rank),
        model_path=config.model_path,
        load_format=config.load_format,
        dtype=config.dtype,
        **{name: value for name in _SERVER_VALUES if (value := server_value(config, server, name)) is not None},
        kv_cache_tokens=config.kv_cache_tokens or kv_cache.get("max_tokens"),
        kv_cache_fraction=config.kv_cache_free_gpu_mem_fraction
        if config.given("kv_cache_free_gpu_mem_fraction")
        else kv_cache.get("free_gpu_memory_fraction", config.kv_cache_free_gpu_mem_fraction),
        tokens_per_block=config.tokens_per_block
        if config.given("tokens_per_block")
        else kv_cache.get("tokens_per_block", config.tokens_per_block),
        enable_chunked_context=config.enable_chunked_context,
        options=config.core_options,
    )


def _thread_share(plan: WorldPlan, rank: int) -> int:
    """This rank's share of its node's cores; all that it is bound to, if its launcher has bound it to some."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if allowed < (os.cpu_count() or 1):
        return allowed
    sharing = sum(1 for r in plan.ranks if r.node == plan.ranks[rank].node and r.instance is not None)
    return max(1, allowed // sharing)


def make_roles(
    config: RunConfig,
    setup: Setup,
    comms: Communicators,
    transports: dict[str, Transport],
    make_harness: Callable[[Transport, RouteMap], Role] | None,
) -> list[Role]:
    """The roles of this rank, in the order in which their phases run; `make_harness` on the harness's rank."""
    plan = setup.plan
    rank = comms.control.rank
    me = plan.ranks[rank]
    ranks = RouteMap(route_ranks(plan))
    route = transports.get("route")
    roles: list[Role] = []
    if me.instance is not None:
        core = BackendRegistry.get(config.core_type)(core_config(config, plan, rank, setup.gpu_bytes), comms.of_instance())
        roles.append(_instance_role(core, plan, rank, ranks, transports))
    if "leader" in me.roles:
        assert route is not None
        roles.append(Leader(route, ranks, plan, config.traffic_distribution_policy, config.stall_timeout))
    if make_harness is not None:
        assert route is not None
        roles.append(make_harness(route, ranks))
    return roles


def _instance_role(core: LLMCore, plan: WorldPlan, rank: int, ranks: RouteMap, transports: dict[str, Transport]) -> Role:
    instance = plan.instances[core.config.instance]
    route = transports.get("route") if rank == instance.leader else None
    leader = ranks[plan.leader_rank]
    if instance.role == "executor":
        return Executor(core, route, leader, instance.index)
    contexts = [i.index for i in plan.instances if i.role == "ctx"]
    generations = [i.index for i in plan.instances if i.role == "gen"]
    # Who warms up whom: every context instance has a generation instance to hand to, and every generation instance is handed something.
    pairs = {(contexts[k % len(contexts)], generations[k % len(generations)]) for k in range(max(len(contexts), len(generations)))}
    handoff = transports["handoff"]
    if instance.role == "ctx":
        members = [r for i in plan.instances if i.role in ("ctx", "gen") for r in i.ranks]
        receivers = {i.index: members.index(i.leader) for i in plan.instances if i.role == "gen"}
        mine = sorted(generation for context, generation in pairs if context == instance.index)
        return Context(core, route, leader, instance.index, handoff, receivers, mine)
    senders = sum(1 for _, generation in pairs if generation == instance.index)
    return Generation(core, route, leader, instance.index, handoff, senders)
