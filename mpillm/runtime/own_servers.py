"""The servers that ranks of a run own: what each is to be, and which GPUs it gets."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from disagg import WorldPlan
from disagg.errors import ConfigError
from disagg.plan_table import ranges
from mpillm.config.disagg_yaml import HALVES
from mpillm.config.idle import SIZES_OF_HALVES, of_engine
from mpillm.config.run_config import RunConfig
from mpillm.configurator.found import Level
from mpillm.devices import Gpu
from mpillm.fields import BY_NAME, FIELDS
from mpillm.roles.server import MOST_RESTARTS, ServerPlan
from mpillm.servers.kind import ServerKind
from mpillm.servers.kinds import kind_of

_MOST_SHOWN = 4  # servers of a role


def gpus_of_servers(
    config: RunConfig, plan: WorldPlan, gpus: Sequence[tuple[Gpu, ...]]
) -> dict[int, tuple[int, ...]]:
    """Return the GPUs of each owner's server, as its process numbers them; none: there are none.

    `gpus`: what each rank sees. Raises ConfigError if a node has some and too few.
    """
    taken: dict[str, set[str]] = {}  # UUIDs, by node
    mine: dict[int, tuple[int, ...]] = {}
    if not config.server or not kind_of(config.server).takes_gpus:
        return mine
    for server in plan.servers:
        seen, node = gpus[server.owner], plan.ranks[server.owner].node
        if not seen:
            continue
        used = taken.setdefault(node, set())
        size = math.prod(_layout(config, server.role).values())
        free = [index for index, gpu in enumerate(seen) if gpu.uuid not in used][:size]
        if len(free) < size:
            there = [other.role for other in plan.servers if plan.ranks[other.owner].node == node]
            needed = sum(math.prod(_layout(config, role).values()) for role in there)
            lower = f"--{SIZES_OF_HALVES[server.role][0]}"
            raise ConfigError(
                f"node {node} has {len(seen)} GPUs, and its {len(there)} servers need {needed}:"
                f" start fewer ranks, or lower {lower}",
                about=["server", SIZES_OF_HALVES[server.role][0]],
            )
        used |= {seen[index].uuid for index in free}
        mine[server.owner] = tuple(free)
    return mine


def server_plans(config: RunConfig, plan: WorldPlan, gpus: Mapping[int, tuple[int, ...]]) -> list[ServerPlan]:
    """Return the servers of a run; `gpus`: see `gpus_of_servers`."""
    if not config.server:
        return []
    kind = kind_of(config.server)
    if plan.n_context_servers and not kind.handover:
        name = kind.name.rstrip(":")
        raise ConfigError(
            f"--server {name} with {config.named('mode')}: {kind.no_handover}", about=["server", "mode"]
        )
    plans = []
    for server in plan.servers:
        nodes = {plan.ranks[rank].node for rank in (server.owner, *server.clients)}
        node = plan.ranks[server.owner].node
        plans.append(
            ServerPlan(
                server.index,
                kind,
                config[BY_NAME[kind.model_option]] or "",
                _values(config, kind, server.role),
                config.server_args,
                gpus.get(server.owner),
                server.place,
                config.tritonserver,
                (config.server_memory_limit or math.inf) * (1 << 30),
                "127.0.0.1" if nodes == {node} else "0.0.0.0",
                "127.0.0.1" if nodes == {node} else node,
                MOST_RESTARTS if config.on_instance_loss == "restart" and server.role != "context" else 0,
                server.role,
                _llm_args(config, server.role) if kind.takes_llm_args else {},
            )
        )
    return plans


def _values(config: RunConfig, kind: ServerKind, role: str) -> dict[str, Any]:
    """Return the values that are stated for the servers of a role, and that the kind takes."""
    of = config.of(HALVES[role]) if role else config
    values = {
        field.name: value
        for field in FIELDS
        if of_engine(field) and kind.takes(field.name)
        if of.origin(field.name).level > Level.DEFAULT and (value := of[field]) is not None
    }
    return values | ({name: n for name, n in _layout(config, role).items() if n > 1} if role else {})


def _layout(config: RunConfig, role: str) -> dict[str, int]:
    """Return the sizes of a server, by the option of one that is no half."""
    mine = zip(SIZES_OF_HALVES[""], SIZES_OF_HALVES[role], strict=True)
    return {name: config[BY_NAME[other]] or 1 for name, other in mine}


def _llm_args(config: RunConfig, role: str) -> dict[str, Any]:
    """Return TensorRT-LLM's arguments in the section of a role, which no option of ours has."""
    sections = dict(config.yaml.sections) if config.yaml else {}
    if role not in HALVES or (section := sections.get(HALVES[role])) is None:
        return {}
    mappings = {
        name: dict(getattr(section, name)) for name in ("kv_cache_config", "cache_transceiver_config")
    }
    return {name: value for name, value in mappings.items() if value} | dict(section.extra)


def server_lines(plan: WorldPlan, plans: Sequence[ServerPlan]) -> list[str]:
    """Return lines that say where the servers run, and their command lines.

    Raises ConfigError for a value that the kind can't take.
    """
    try:
        commands = [str(one.shown()) for one in plans]
    except ValueError as error:
        raise ConfigError(f"--server: {error}", about=["server"]) from None
    of_roles = Counter[str]()
    shown = []
    for server, one, command in zip(plan.servers, plans, commands, strict=True):
        of_roles[server.role] += 1
        shown += [(server, one, command)] if of_roles[server.role] <= _MOST_SHOWN else []
    whose = {command: f"{server.role} servers".strip() for server, _, command in reversed(shown)}
    lines = [f"{whose[command]}: {command}" for command in dict.fromkeys(command for *_, command in shown)]
    for server, one, _ in shown:
        where = f"rank {server.owner} on {plan.ranks[server.owner].node}"
        devices = f", GPU{'s' * (len(one.devices) > 1)} {ranges(one.devices)}" if one.devices else ""
        shared = len(server.clients) > 1 or server.owner not in server.clients
        many = "s" * (len(server.clients) > 1)
        clients = f", client{many}: rank{many} {ranges(server.clients)}" if shared else ""
        lines.append(f"{one.name}: {where}{devices}{clients}")
    if len(plans) > len(shown):
        lines.append(f"and {len(plans) - len(shown)} more servers like these")
    return lines
