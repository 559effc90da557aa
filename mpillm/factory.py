"""From the plan to the roles of one rank."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from disagg import DisaggConfig, ServerConfig, WorldPlan
from mpillm import fields
from mpillm.comms.mover import MpiMover, Peer
from mpillm.comms.transport import Transport
from mpillm.comms.world import Communicators, handoff_ranks, route_ranks
from mpillm.config import RunConfig
from mpillm.cores import BackendRegistry, CoreConfig, LLMCore
from mpillm.devices import OwnGpu
from mpillm.fields.flags import CHUNKING_POLICIES, RUNTIME_FLAGS, SCHEDULER_POLICIES
from mpillm.harness_config import TrtllmHarnessConfig
from mpillm.planning import Setup
from mpillm.roles.base import Role, RouteMap
from mpillm.roles.ctx import Context
from mpillm.roles.executor import Executor
from mpillm.roles.gen import Generation
from mpillm.roles.instance import InstanceRole
from mpillm.roles.leader import Leader

_LIMITS = ("max_batch_size", "max_num_tokens")  # where nobody says, CoreConfig does
_POLICIES = {theirs: ours for ours, theirs in (SCHEDULER_POLICIES | CHUNKING_POLICIES).items()}  # of a YAML's scheduler_config
_CORE_ROLES = {"ctx": "context", "gen": "generation", "executor": "executor"}


def core_configs(config: RunConfig, plan: WorldPlan, ranks: Iterable[int], gpus: dict[int, OwnGpu]) -> list[CoreConfig]:
    """What the cores on `ranks` (of instances) are built from; `gpus`: see `devices.assign`."""
    workers = Counter(rank.node for rank in plan.ranks if rank.instance is not None)
    return [_core_config(config, plan, rank, gpus, workers[plan.ranks[rank].node]) for rank in ranks]


def _core_config(config: RunConfig, plan: WorldPlan, rank: int, gpus: dict[int, OwnGpu], node_ranks: int) -> CoreConfig:
    """`node_ranks`: ranks of its node that belong to an instance."""
    me = plan.ranks[rank]
    assert me.instance is not None
    instance, gpu = plan.instances[me.instance], gpus.get(rank)
    server = instance.server
    kv_cache = server.kv_cache_config or {}
    scheduler = server.extra.get("scheduler_config") or {}

    harness = config.build(TrtllmHarnessConfig)

    def chosen(name: str, in_file: Any) -> Any:
        """What a person set goes before the file, the file before the default."""
        return getattr(config, name) if config.given(name) or in_file is None else in_file

    def flag(name: str, in_file: Any) -> Any:
        """As `chosen`, of a runtime flag."""
        given = config.given(RUNTIME_FLAGS[name].name)
        return harness.runtime_flags.get(name) if given or in_file is None else in_file

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
        device=gpu.device if gpu else None,
        gpu_bytes=gpu.free if gpu else None,
        n_threads=config.num_threads or _thread_share(node_ranks),
        model_path=config.model_path,
        load_format=config.load_format,
        dtype=config.dtype,
        quantization=config.quantization,
        engine_dir=config.engine_dir,
        **{name: value for name in _LIMITS if (value := flag(name, getattr(server, name))) is not None},
        max_seq_len=chosen("max_seq_len", server.max_seq_len),
        kv_cache_tokens=config.kv_cache_tokens or kv_cache.get("max_tokens"),
        kv_cache_fraction=flag("kvcache_free_gpu_mem_frac", kv_cache.get("free_gpu_memory_fraction")),
        tokens_per_block=chosen("tokens_per_block", kv_cache.get("tokens_per_block")),
        enable_chunked_context=flag("enable_chunked_context", server.extra.get("enable_chunked_prefill")),
        context_chunking_policy=flag("context_chunking_policy", _POLICIES.get(scheduler.get("context_chunking_policy", ""))),
        batch_scheduler_policy=flag("batch_scheduler_policy", _POLICIES.get(scheduler.get("capacity_scheduler_policy", ""))),
        enable_kv_cache_reuse=chosen("enable_kv_cache_reuse", kv_cache.get("enable_block_reuse")),
        beam_width=chosen("beam_width", server.extra.get("max_beam_width")),
        end_ids=config.end_ids,
        stop_words=tuple(word if isinstance(word, str) else tuple(word) for word in config.stop_words or ()),
        node_ranks=node_ranks,
        options=config.core_options,
    )


def routing_policy(config: RunConfig, server: ServerConfig) -> str:
    """Which of a section's instances gets a request: as a person set it, else as the section's router says, if that is a policy of ours."""
    in_file = server.router.get("type")
    in_force = in_file in fields.traffic_distribution_policy.choices and not config.given("traffic_distribution_policy")
    return str(in_file if in_force else config.traffic_distribution_policy)


def routing_notes(config: RunConfig, yaml: DisaggConfig) -> list[str]:
    """A line for each section of the file whose router is none of our policies."""
    routers = [(name, server.router.get("type"), routing_policy(config, server)) for name, server in yaml.sections]
    return [
        f"{name}: there is no router {asked} here; requests go by {policy}"
        for name, asked, policy in routers
        if asked not in (None, *fields.traffic_distribution_policy.choices)
    ]


def _thread_share(node_ranks: int) -> int:
    """This rank's share of its node's cores; all that it is bound to, if its launcher has bound it to some."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if allowed < (os.cpu_count() or 1):
        return allowed
    return max(1, allowed // node_ranks)


def make_roles(
    config: RunConfig,
    setup: Setup,
    comms: Communicators,
    route: Transport | None,
    make_harness: Callable[[Transport, RouteMap], Role] | None,
) -> list[Role]:
    """The roles of this rank, in the order in which their phases run; `make_harness` on the harness's rank."""
    plan = setup.plan
    rank = comms.control.rank
    me = plan.ranks[rank]
    ranks = RouteMap(route_ranks(plan))
    roles: list[Role] = []
    if me.instance is not None:
        (core_config,) = core_configs(config, plan, [rank], setup.gpus)
        core = BackendRegistry.get(config.core_type)(core_config, comms.of_instance())
        roles.append(_instance_role(core, plan, rank, ranks, route, comms))
    if "leader" in me.roles:
        assert route is not None
        entry, generation = (routing_policy(config, plan.instances[i].server) for i in (0, -1))
        roles.append(Leader(route, ranks, plan, entry, generation, config.stall_timeout))
    if make_harness is not None:
        assert route is not None
        roles.append(make_harness(route, ranks))
    return roles


def _instance_role(
    core: LLMCore, plan: WorldPlan, rank: int, ranks: RouteMap, route: Transport | None, comms: Communicators
) -> InstanceRole:
    instance = plan.instances[core.config.instance]
    if rank != instance.leader:
        route = None
    leader = ranks[plan.leader_rank]
    if instance.role == "executor":
        return Executor(core, route, leader, instance.index)
    assert comms.handoff is not None
    contexts = [i for i in plan.instances if i.role == "ctx"]
    generations = [i for i in plan.instances if i.role == "gen"]
    members = handoff_ranks(plan)
    others = generations if instance.role == "ctx" else contexts
    core.connect(MpiMover(comms.handoff), {i.index: Peer(members.index(i.leader), i.tp_size, i.pp_size) for i in others})
    # Who warms up whom: every context instance has a generation instance to hand to, and every generation instance is handed something.
    n = max(len(contexts), len(generations))
    pairs = {(contexts[k % len(contexts)].index, generations[k % len(generations)].index) for k in range(n)}
    if instance.role == "ctx":
        receivers = {i.index: ranks[i.leader] for i in generations}
        mine = sorted(generation for context, generation in pairs if context == instance.index)
        return Context(core, route, leader, instance.index, receivers, mine)
    senders = {ranks[i.leader]: i.index for i in contexts}
    return Generation(core, route, leader, instance.index, senders, sum(1 for _, generation in pairs if generation == instance.index))
