"""The servers that ranks of a run own: what each is to be, and which GPUs it gets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from disagg import WorldPlan
from disagg.errors import ConfigError
from disagg.plan_table import ranges
from mpillm.config.idle import of_engine
from mpillm.config.run_config import RunConfig
from mpillm.configurator.found import Level
from mpillm.devices import Gpu
from mpillm.fields import BY_NAME, FIELDS
from mpillm.roles.server import ServerPlan
from mpillm.servers.kinds import kind_of

_MOST_SHOWN = 4


def gpus_of_servers(
    config: RunConfig, plan: WorldPlan, gpus: Sequence[tuple[Gpu, ...]]
) -> dict[int, tuple[int, ...]]:
    """Return the GPUs of each owner's server, as its process numbers them; none: there are none.

    `gpus`: what each rank sees. Raises ConfigError if a node has some and too few.
    """
    size = (config.tensor_parallelism or 1) * (config.pipeline_parallelism or 1)
    taken: dict[str, set[str]] = {}  # UUIDs, by node
    mine: dict[int, tuple[int, ...]] = {}
    if not config.server or not kind_of(config.server).takes_gpus:
        return mine
    for server in plan.servers:
        seen, node = gpus[server.owner], plan.ranks[server.owner].node
        if not seen:
            continue
        used = taken.setdefault(node, set())
        free = [index for index, gpu in enumerate(seen) if gpu.uuid not in used][:size]
        if len(free) < size:
            n_servers = sum(plan.ranks[other.owner].node == node for other in plan.servers)
            raise ConfigError(
                f"node {node} has {len(seen)} GPUs for {n_servers} servers of {size} each: start fewer ranks,"
                " or lower --tensor_parallelism",
                about=["server", "tensor_parallelism"],
            )
        used |= {seen[index].uuid for index in free}
        mine[server.owner] = tuple(free)
    return mine


def server_plans(config: RunConfig, plan: WorldPlan, gpus: Mapping[int, tuple[int, ...]]) -> list[ServerPlan]:
    """Return the servers of a run; `gpus`: see `gpus_of_servers`."""
    if not config.server:
        return []
    kind = kind_of(config.server)
    values = {
        field.name: value
        for field in FIELDS
        if of_engine(field) and kind.takes(field.name)
        if config.origin(field.name).level > Level.DEFAULT and (value := config[field]) is not None
    }
    plans = []
    for server in plan.servers:
        nodes = {plan.ranks[rank].node for rank in server.clients}
        node = plan.ranks[server.owner].node
        plans.append(
            ServerPlan(
                server.index,
                kind,
                config[BY_NAME[kind.model_option]] or "",
                values,
                config.server_args,
                gpus.get(server.owner),
                server.place,
                config.tritonserver,
                (config.server_memory_limit or math.inf) * (1 << 30),
                "127.0.0.1" if nodes == {node} else "0.0.0.0",
                "127.0.0.1" if nodes == {node} else node,
            )
        )
    return plans


def server_lines(plan: WorldPlan, plans: Sequence[ServerPlan]) -> list[str]:
    """Return lines that say where the servers run, and their command lines.

    Raises ConfigError for a value that the kind can't take.
    """
    try:
        commands = [str(one.shown()) for one in plans]
    except ValueError as error:
        raise ConfigError(f"--server: {error}", about=["server"]) from None
    lines = [f"servers: {command}" for command in dict.fromkeys(commands[:_MOST_SHOWN])]
    for server, one in list(zip(plan.servers, plans, strict=True))[:_MOST_SHOWN]:
        where = f"rank {server.owner} on {plan.ranks[server.owner].node}"
        devices = f", GPU{'s' * (len(one.devices) > 1)} {ranges(one.devices)}" if one.devices else ""
        clients = f", clients: ranks {ranges(server.clients)}" if len(server.clients) > 1 else ""
        lines.append(f"{one.name}: {where}{devices}{clients}")
    if len(plans) > _MOST_SHOWN:
        lines.append(f"and {len(plans) - _MOST_SHOWN} more servers like these")
    return lines
