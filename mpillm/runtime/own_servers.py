"""Servers that ranks of a run own: their specifications and GPUs."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from disagg import WorldPlan
from disagg.errors import ConfigError
from disagg.plan_table import ranges
from disagg.world_plan import OwnServer
from launch.command import wrapped
from mpillm.devices import Gpu
from mpillm.files import read_object
from mpillm.options.columns import INDENT, WIDTH
from mpillm.options.disagg_yaml import ROLE_SECTIONS
from mpillm.options.fields import BY_NAME, FIELDS
from mpillm.options.run_config import RunConfig
from mpillm.options.sources import Source
from mpillm.options.unused_options import SERVER_SIZES, of_engine
from mpillm.programs.servers.kind import ServerKind, ServerNode, ServerSpec
from mpillm.programs.servers.kinds import kind_of
from mpillm.programs.servers.server_options import advice_on
from mpillm.roles.server import MAX_RESTARTS

_MAX_LISTED = 4  # servers of each role


def gpus_of_servers(
    config: RunConfig, plan: WorldPlan, gpus: Sequence[tuple[Gpu, ...]]
) -> dict[int, tuple[int, ...]]:
    """Return the GPUs that each owner rank gives to its server, or to its node's part of a server.

    GPUs are numbered as the rank sees them. A rank without GPUs is missing: its server uses CPUs.
    `gpus`: visible GPUs of each rank. Raises ConfigError if a node with GPUs has too few.
    """
    used_on: dict[str, set[str]] = {}  # UUIDs of used GPUs, by node
    by_owner: dict[int, tuple[int, ...]] = {}
    if not config.server or not kind_of(config.server).takes_gpus:
        return by_owner
    owners = [(rank, server.role) for server in plan.servers for rank in server.parts]
    for rank, role in owners:
        visible, node = gpus[rank], plan.ranks[rank].node
        if not visible:
            continue
        used = used_on.setdefault(node, set())
        size = _gpus_of_a_node(config, role)
        free = [index for index, gpu in enumerate(visible) if gpu.uuid not in used][:size]
        if len(free) < size:
            roles = [other for owner, other in owners if plan.ranks[owner].node == node]
            needed = sum(_gpus_of_a_node(config, other) for other in roles)
            lower = f"--{SERVER_SIZES[role][0]}"
            too_large = not role and size > len(visible)
            more = f", or raise --server_nodes to {-(-size // len(visible))}" if too_large else ""
            raise ConfigError(
                f"node {node} has {len(visible)} GPUs, and its {len(roles)} servers need {needed}:"
                f" start fewer ranks, or lower {lower}{more}",
                about=["server", SERVER_SIZES[role][0]],
            )
        used |= {visible[index].uuid for index in free}
        by_owner[rank] = tuple(free)
    return by_owner


def _gpus_of_a_node(config: RunConfig, role: str) -> int:
    """Return the number of GPUs that a server of this role uses on each of its nodes."""
    return math.prod(_layout(config, role).values()) // config.server_nodes


def server_specs(
    config: RunConfig,
    plan: WorldPlan,
    gpus: Mapping[int, tuple[int, ...]],
    ports: Mapping[int, int] = MappingProxyType({}),
) -> list[ServerSpec]:
    """Return a run's servers, one spec per node of each. `gpus`: see `gpus_of_servers`; `ports`: `Setup`."""
    if not config.server:
        return []
    kind = kind_of(config.server)
    if plan.n_context_servers and not kind.disagg_protocol:
        raise ConfigError(
            f"--server {kind.short_name} with {config.named('mode')}: {kind.no_disagg}",
            about=["server", "mode"],
        )
    restarts = MAX_RESTARTS if config.on_instance_loss == "restart" else 0
    release = kind.release()
    specs = []
    for server, (index, rank) in [(one, part) for one in plan.servers for part in enumerate(one.parts)]:
        nodes = {plan.ranks[rank].node for rank in (server.owner, *server.clients)}
        node, first = plan.ranks[rank].node, plan.ranks[server.owner].node
        reached_at = "127.0.0.1" if nodes == {node} else node
        hosts = tuple(plan.ranks[part].node for part in server.parts)
        if kind.launcher is not None and not index:
            _check_same_gpus(server, hosts, gpus)
        specs.append(
            ServerSpec(
                kind=kind,
                model=config[BY_NAME[kind.model_option]] or "",
                values=_values(config, kind, server.role),
                index=server.index,
                rank=rank,
                args=config.server_args,
                devices=gpus.get(rank),
                place=server.place,
                program=config.tritonserver,
                max_bytes=(config.server_memory_limit or math.inf) * (1 << 30),
                host="127.0.0.1" if nodes == {node} else "0.0.0.0",
                reached_at=reached_at,
                address=reached_at,
                restarts=restarts if server.role != "context" else 0,
                stall_s=config.stall_timeout,
                release=release,
                role=server.role,
                resets_prefix_cache=config.reset_prefix_cache,
                profiles=config.profile,
                llm_args=_llm_args(config, server.role) if kind.takes_llm_args else {},
                node=ServerNode(
                    index, len(server.parts), first, ports.get(server.owner, "MEETING_PORT"), hosts
                ),
                more_ports={name: f"{name.upper()}_PORT" for name in kind.ports(server.role)},
            )
        )
    return specs


def _check_same_gpus(server: OwnServer, hosts: Sequence[str], gpus: Mapping[int, tuple[int, ...]]) -> None:
    """Raise ConfigError if a server that one launcher starts has different GPUs on its nodes."""
    texts = [ranges(gpus[part]) if part in gpus else "none" for part in server.parts]
    if len({*texts}) > 1:
        listed = ", ".join(f"{text} on {host}" for host, text in zip(hosts, texts, strict=True))
        raise ConfigError(
            f"--server_nodes {len(hosts)}: server {server.index} has GPUs {listed}; must have the same"
            " numbers on each node: let the servers have all GPUs of their nodes",
            about=["server_nodes"],
        )


def _values(config: RunConfig, kind: ServerKind, role: str) -> dict[str, Any]:
    """Return the explicit values for a role's servers that this kind of server accepts."""
    of = config.in_section(ROLE_SECTIONS[role]) if role else config
    values = {
        field.name: value
        for field in FIELDS
        if of_engine(field) and kind.takes(field.name)
        if of.option_value(field.name).source > Source.DEFAULT and (value := of[field]) is not None
    }
    return values | ({name: n for name, n in _layout(config, role).items() if n > 1} if role else {})


def _layout(config: RunConfig, role: str) -> dict[str, int]:
    """Return the parallel sizes of a role's server, under the option names of an aggregated server."""
    names = zip(SERVER_SIZES[""], SERVER_SIZES[role], strict=True)
    return {name: config[BY_NAME[other]] or 1 for name, other in names}


def _llm_args(config: RunConfig, role: str) -> dict[str, Any]:
    """Return the TensorRT-LLM arguments in a role's YAML section that correspond to no option."""
    sections = dict(config.yaml.sections) if config.yaml else {}
    if role not in ROLE_SECTIONS or (section := sections.get(ROLE_SECTIONS[role])) is None:
        return {}
    mappings = {
        name: dict(getattr(section, name)) for name in ("kv_cache_config", "cache_transceiver_config")
    }
    return {name: value for name, value in mappings.items() if value} | dict(section.extra)


def server_lines(plan: WorldPlan, specs: Sequence[ServerSpec]) -> list[str]:
    """Return lines with the ranks and the command lines of the servers, and with doubtful options.

    Raises ConfigError for a value that the kind of server does not support, or an option that the installed
    release does not know.
    """
    try:
        commands = [_printed_command(one) for one in specs]
    except ValueError as error:
        raise ConfigError(f"--server: {error}", about=["server"]) from None
    of_roles = Counter[str]()
    listed = []
    for one, command in zip(specs, commands, strict=True):
        of_roles[one.role] += 1
        listed += [(plan.servers[one.index], one, command)] if of_roles[one.role] <= _MAX_LISTED else []
    owners = {
        command: f"{one.role} servers{'' if one.launcher else one.of_nodes}".strip()
        for _, one, command in reversed(listed)
        if command
    }
    lines = [
        wrapped([f"{owners[command]}:", *command], WIDTH - len(INDENT))
        for command in dict.fromkeys(command for *_, command in listed if command)
    ]
    for server, one, _ in listed:
        where = f"rank {one.rank} on {plan.ranks[one.rank].node}"
        devices = f", GPU{'s' * (len(one.devices) > 1)} {ranges(one.devices)}" if one.devices else ""
        shared = not one.node.number and (len(server.clients) > 1 or server.owner not in server.clients)
        many = "s" * (len(server.clients) > 1)
        clients = f", client{many}: rank{many} {ranges(server.clients)}" if shared else ""
        lines.append(f"{one.title}: {where}{devices}{clients}")
    if len(specs) > len(listed):
        lines.append(f"and {len(specs) - len(listed)} more servers like these")
    by_role = {one.role: one for one in specs}
    if "context" in by_role and "generation" in by_role:
        context, generation = by_role["context"], by_role["generation"]
        if why := context.kind.no_transfer(context, generation, _kv_heads(context.model)):
            lines.append(f"warning: no KV cache will arrive: {why}")
    return lines + _option_lines(specs)


def _printed_command(spec: ServerSpec) -> tuple[str, ...]:
    """Return the command line that the owner starts, in shell syntax; () if the first owner starts all."""
    command = spec.command()
    if spec.launcher is not None:
        if spec.node.number:
            return ()
        command = spec.launcher.command(spec, command, command.argv)
    return tuple(command.shell_args())


def _option_lines(specs: Sequence[ServerSpec]) -> list[str]:
    """Return lines about options in the servers' command lines. Raises ConfigError for unknown options."""
    lines = [*dict.fromkeys(line for spec in specs if spec.kind.notes for line in spec.kind.notes(spec))]
    if not specs or (release := specs[0].release) is None:
        return lines
    args = specs[0].args
    if release.unreadable:
        return (
            [*lines, f"--server_args: not checked before the start: {release.unreadable}"] if args else lines
        )
    own = release.options(args)
    if unknown := release.unknown(arg for spec in specs for arg in spec.command().argv):
        option, suffix = ("server_args", "") if unknown[0] in own else ("server", ", which mpillm uses")
        raise ConfigError(f"--{option}: {release.why_unknown(unknown[0])}{suffix}", about=[option])
    return lines + [
        f"--server_args: {release} deprecates {name}; {advice_on(new_name)}"
        for name, new_name in release.deprecated.items()
        if name in own
    ]


def _kv_heads(model: str) -> int | None:
    """Return the KV heads of a model's folder; None if unknown, or if not all of the cache has heads."""
    file = Path(model) / "config.json"
    if not file.is_file():
        return None
    config = read_object(file)
    if isinstance(text := config.get("text_config"), dict):
        config = text
    # Latents (MLA) and states have no heads to distribute.
    if any(re.match("kv_lora_rank|mamba_|ssm_|linear_|hybrid_", name) for name in config):
        return None
    heads = config.get("num_key_value_heads", config.get("num_attention_heads"))
    return heads if isinstance(heads, int) else None
