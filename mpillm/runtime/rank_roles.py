"""From the plan to one rank's roles and its core's configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from disagg import WorldPlan
from mpillm.comms.communicators import Communicators, handoff_ranks
from mpillm.comms.messages import Setup
from mpillm.comms.mover import MpiMover, Peer
from mpillm.comms.transport import Transport
from mpillm.cores.base import LLMCore
from mpillm.cores.capabilities import OutlivesServer, TransfersKv, WorksInAnyThread
from mpillm.cores.clients import DEADLINE_SHARE
from mpillm.cores.registry import BackendRegistry
from mpillm.errors import Failure
from mpillm.options.disagg_values import router_arguments
from mpillm.options.run_config import RunConfig
from mpillm.programs.servers.kind import server_log
from mpillm.roles.follower import FollowerRole
from mpillm.roles.instance import InstanceRole
from mpillm.roles.role import Importer, Role
from mpillm.runtime.core_configs import core_configs, with_settings

if TYPE_CHECKING:
    from mpillm.comms.loop import EventLoop
    from mpillm.roles.prefix_pool import PrefixRouting
    from mpillm.runtime.run_session import RunSession


def prefix_routing(config: RunConfig) -> PrefixRouting:
    """Return the arguments of the YAML's router; without a YAML, the tokens per block of the KV cache."""
    from mpillm.roles.prefix_pool import PrefixRouting

    tokens_per_block = config.entry_section.tokens_per_block
    if config.yaml is None:
        return PrefixRouting(tokens_per_block)
    return PrefixRouting(**router_arguments(config.yaml.sections[0][1], tokens_per_block))


def make_roles(
    config: RunConfig,
    setup: Setup,
    comms: Communicators,
    route: Transport | None,
    session: RunSession | None,
    report: Callable[[Failure], None],
    announce: Callable[[str, str], None],
    loop: EventLoop,
    *,
    serves: bool,
) -> list[Role]:
    """Return this rank's roles, in the order in which their phases run.

    Args:
        config: the run's configuration.
        setup: values from rank 0.
        comms: this rank's communicators.
        route: transport for requests and responses; None on a rank that uses neither.
        session: rank 0's session.
        report: see `Leader`.
        announce: see `RankControl`.
        loop: this rank's event loop. Its present pollers raise the errors that end the run.
        serves: requests come from HTTP clients, not from LoadGen.
    """
    plan = setup.plan
    rank = comms.control.rank
    own = plan.ranks[rank]
    core_class = BackendRegistry.get(config.core_type)
    roles: list[Role] = [Importer(core_class.world_import)] if core_class.world_import else []
    server = None
    if "server" in own.roles:
        from mpillm.roles.server import ServerRole  # few runs start servers
        from mpillm.runtime.own_servers import server_specs

        specs = server_specs(config, plan, setup.server_gpus, setup.server_ports)
        spec = next(one for one in specs if one.rank == rank)
        folder, deadline_s = Path(setup.log_dir), DEADLINE_SHARE * config.load_deadline
        server = ServerRole(spec, folder, deadline_s, loop.wake, announce, setup.server_secret)
        roles.append(server)
    if own.instance is not None:
        with config.in_section(plan.instances[own.instance].section).explained():
            (core_config,) = with_settings(config, plan, core_configs(config, plan, [rank], setup.gpus))
            client = replace(core_config.client, sends_text=setup.sends_text)
            core = core_class(replace(core_config, serves=serves, client=client), comms.instance)
        core.wake = loop.wake
        if serves and isinstance(core, WorksInAnyThread):
            core.wake = loop.run_inline_or_wake
            if session is not None and session.http is not None:
                core.share(session.http)
        if config.server:
            core.server_log = partial(server_log, Path(setup.log_dir))
        core.check_run = partial(_all, [*loop.pollers, *([server.poll] if server is not None else [])])
        if server is not None and config.on_instance_loss == "restart" and isinstance(core, OutlivesServer):
            server.dependent = core
        roles.append(_instance_role(core, plan, rank, route, comms, session, setup.outlives_losses))
    if route is not None and "leader" in own.roles:
        from mpillm.roles.leader import Leader  # only one rank needs it

        entry, generation = (
            config.in_section(plan.instances[i].section).traffic_distribution_policy for i in (0, -1)
        )
        roles.append(
            Leader(
                route,
                plan,
                entry,
                generation,
                config.stall_timeout,
                report,
                prefix_routing(config),
                all_at_once=not serves and config.issues_all_at_once,
                max_local_prefill_length=0 if serves else config.max_local_prefill_length,
            )
        )
    if route is not None and session is not None:
        roles += session.make_harness(route, plan.leader_rank, loop)
    return roles


def _all(looks: Sequence[Callable[[], object]]) -> None:
    for look in looks:
        look()


def _instance_role(
    core: LLMCore,
    plan: WorldPlan,
    rank: int,
    route: Transport | None,
    comms: Communicators,
    session: RunSession | None,
    outlives_others: bool,
) -> FollowerRole:
    instance = plan.instances[core.config.instance]
    leader = plan.leader_rank
    contexts = [i for i in plan.instances if i.role == "ctx"]
    generations = [i for i in plan.instances if i.role == "gen"]
    if comms.handoff is not None:
        members = handoff_ranks(plan)
        others = generations if instance.role == "ctx" else contexts
        peers = {i.index: Peer(members.index(i.root_rank), i.tp_size, i.pp_size) for i in others}
        mover = MpiMover(comms.handoff, outlives_others=outlives_others)
        assert isinstance(core, TransfersKv)  # `join` has checked the core's class
        core.connect(mover, peers)
    if route is None or rank != instance.root_rank:
        return FollowerRole(core)
    if session is not None and (role := session.make_disagg_role(core, route, leader, instance.index)):
        return role
    if instance.role == "executor":
        return InstanceRole(core, route, leader, instance.index)
    # Pairs for the warm-up: every context instance sends a KV cache, every generation instance receives one.
    n = max(len(contexts), len(generations))
    pairs = {(contexts[k % len(contexts)].index, generations[k % len(generations)].index) for k in range(n)}
    if instance.role == "ctx":
        from mpillm.roles.context import ContextRole  # like generation, only for disaggregated runs

        receivers = {i.index: i.root_rank for i in generations}
        own_targets = sorted(generation for context, generation in pairs if context == instance.index)
        return ContextRole(core, route, leader, instance.index, receivers, own_targets)
    from mpillm.roles.generation import GenerationRole

    senders = {i.root_rank: i.index for i in contexts}
    n_pairs = sum(generation == instance.index for _, generation in pairs)
    return GenerationRole(core, route, leader, instance.index, senders, n_pairs)
