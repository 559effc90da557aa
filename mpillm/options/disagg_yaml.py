"""The disaggregation configuration of a run: the user's YAML, or one generated from the options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import disagg
from disagg import DisaggConfig, WorldPlan
from disagg.errors import ConfigError
from disagg.schema import SECTIONS
from mpillm.options.disagg_values import CORE, EXPERTS, ROUTER, SIZES, written
from mpillm.options.run_config import RunConfig
from mpillm.options.sources import Source

ROLE_SECTIONS = {"context": SECTIONS[0], "generation": SECTIONS[1]}
"""The section of a context or generation server, by its role."""

PORTS = ("server_port", "worker_start_port")
"""Options that set the addresses in a generated configuration."""


def disagg_config(config: RunConfig, world_size: int | None, clients: bool = False) -> DisaggConfig:
    """Return the user's YAML, or one generated from the options for `world_size` ranks.

    `clients`: the ranks are clients of servers. Then each worker rank is an executor, and explicit sizes are
    the servers' layout. Some ranks may own context servers (see `context_servers`). Raises ConfigError naming
    the file or the option.
    """
    if clients:
        n_executors = None
        if counts := _server_counts(config, world_size):
            n_executors, world_size = counts[1] * config.clients_of_a_server, None
        return disagg.generate(
            "aggregated",
            world_size,
            control_ranks=config.control_ranks,
            num_executors=n_executors,
            model=config.model_path,
        )
    if config.disagg_role:
        return _one_instance(config, ROLE_SECTIONS[config.disagg_role])
    yaml = config.yaml or config.with_yaml().yaml
    if yaml is None:
        return generated(config, world_size)
    _check_control_ranks(config, yaml, world_size)
    return yaml


def world_plan(
    config: RunConfig, yaml: DisaggConfig, world_size: int, nodes: Sequence[str] | None
) -> WorldPlan:
    """Return the plan of a run; `nodes`: by rank. Raises ConfigError if the ranks do not fit `yaml`."""
    n_contexts = context_servers(config, world_size)
    return disagg.plan(yaml, world_size, nodes, config.clients_of_a_server, n_contexts, config.server_nodes)


def context_servers(config: RunConfig, world_size: int | None) -> int:
    """Return how many of the run's servers are context servers; `world_size`: see `disagg_config`.

    Raises ConfigError if the explicit numbers of servers do not fit `world_size`.
    """
    counts = _server_counts(config, world_size)
    return counts[0] if counts else 0


def server_ranks(config: RunConfig) -> int | None:
    """Return how many ranks own context and generation servers of the run, or are clients of these servers.

    None if the run starts no such servers. The number of servers defaults to one of each kind.
    """
    counts = _server_counts(config, None)
    return counts[0] + counts[1] * config.clients_of_a_server if counts else None


def _server_counts(config: RunConfig, world_size: int | None) -> tuple[int, int] | None:
    """Return the number of context servers and of generation servers; None if the run starts no such servers.

    A context server needs one rank, its owner. A generation server needs a rank for each of its clients.
    """
    if not config.server or config.mode != "disaggregated":
        return None
    config_yaml = disagg.generate(
        "disaggregated",
        world_size,
        control_ranks=config.control_ranks,
        num_ctx_servers=config.num_ctx_servers,
        num_gen_servers=config.num_gen_servers,
        gen_tp_size=config.clients_of_a_server,
    )
    contexts, generations = (server.num_instances for _, server in config_yaml.sections)
    return contexts, generations


def _check_control_ranks(config: RunConfig, yaml: DisaggConfig, world_size: int | None) -> None:
    """Raise ConfigError if --control_ranks differs from the number of ranks without an instance in `yaml`."""
    n = config.control_ranks
    if n is not None and world_size not in (None, yaml.n_workers + n):
        raise ConfigError(
            f"{config.named('control_ranks')}: with the {yaml.n_workers} worker ranks of"
            f" {config.disagg_config} it takes {yaml.n_workers + n} ranks, not {world_size}",
            about=["control_ranks"],
        )


def _one_instance(config: RunConfig, section: str) -> DisaggConfig:
    """Return one instance of a section, from the YAML or, without a YAML, with the sizes of the options."""
    yaml = config.yaml or config.with_yaml().yaml
    if yaml is not None:
        server = dict(yaml.sections).get(section)
        if server is None or not server.num_instances:
            raise ConfigError(f"{config.disagg_config}: there is no instance in {section}")
        server = replace(server, num_instances=1, urls=())
    else:
        ((_, server),) = generated(config, None).sections
    sections: dict[str, Any] = {section: server}
    return DisaggConfig(model=config.model_path, **sections)


def generated(config: RunConfig, world_size: int | None, control_ranks: int | None = None) -> DisaggConfig:
    """Return the instances that the options describe, without a YAML.

    `world_size`: None: as many ranks as needed. `control_ranks`: overrides the option.
    """
    try:
        return disagg.generate(
            config.mode,
            world_size,
            control_ranks=config.control_ranks if control_ranks is None else control_ranks,
            model=config.model_path,
            port=config.server_port,
            first_worker_port=config.worker_start_port,
            num_ctx_servers=config.num_ctx_servers,
            ctx_tp_size=config.ctx_tp_size or 1,
            ctx_pp_size=config.ctx_pp_size or 1,
            num_gen_servers=config.num_gen_servers,
            gen_tp_size=config.gen_tp_size or 1,
            gen_pp_size=config.gen_pp_size or 1,
            tensor_parallelism=config.tensor_parallelism or 1,
            pipeline_parallelism=config.pipeline_parallelism or 1,
            moe_expert_parallelism=config.moe_expert_parallelism or 1,
        )
    except ConfigError as error:
        used_sections = SECTIONS[:2] if config.mode == "disaggregated" else SECTIONS[2:]
        sizes = [
            place.field.name
            for places in (*(SIZES[section] for section in used_sections), (EXPERTS,))
            for place in places
        ]
        size_options = [name for name in sizes if config.option_value(name).source > Source.DEFAULT]
        size_options += PORTS if any(map(config.is_user_set, PORTS)) else ()
        raise ConfigError("\n".join([str(error), *map(config.named, size_options)])) from None


def with_core_values(config: RunConfig, yaml: DisaggConfig) -> DisaggConfig:
    """Return the YAML with the options for the engine, for readers that have only the file."""
    values = {
        place: config[place.field]
        for place in CORE
        if config.option_value(place.field.name).source > Source.DEFAULT
    }
    return yaml.with_sections(
        lambda _, server: written(server, {**values, ROUTER: config.traffic_distribution_policy})
    )
