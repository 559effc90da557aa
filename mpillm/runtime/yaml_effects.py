"""Settings of a disaggregation YAML that have no effect. `plan`, `run` and `serve` name or refuse them.

A line of output names such a setting. If ignoring it would change the measurement, the command refuses it.
`unused_options` checks settings that correspond to an option.
"""

from __future__ import annotations

from collections.abc import Collection

from disagg import ServerConfig
from disagg.errors import ConfigError
from disagg.schema import DISCOVERY, section_kind
from mpillm.cores.base import LLMCore
from mpillm.cores.registry import BackendRegistry
from mpillm.options.disagg_values import (
    LEADER_READS,
    PERF_METRICS,
    ROUTER,
    YamlKey,
    leaders_without_effect,
    without_effect,
    without_option,
)
from mpillm.options.disagg_yaml import ROLE_SECTIONS
from mpillm.options.run_config import RunConfig
from mpillm.programs.servers.kinds import kind_of
from mpillm.workloads.rounds import speculation_rule


def check_yaml(config: RunConfig) -> list[str]:
    """Return the lines on a run's YAML: its form, and the settings that have no effect in this run.

    Raises ConfigError if a setting must not be ignored.
    """
    core = BackendRegistry.declared(config.core_type)
    lines = [*config.yaml_lines]
    if config.yaml:
        _check_lists(config, core.is_client)
        if _needs_model(config, core) and not config.model_path:
            lines.append(f"{config.disagg_config}: no model in it: a run needs --model_path")
    if core.is_client:  # the YAML is for its servers
        if config.yaml:
            _check_speculation(config)
        return [*lines, *(_of_own_servers(config) if config.server and config.yaml else ())]
    if config.yaml and not (config.disagg_role or config.instance_run):
        lines += _of_the_leader(config, (PERF_METRICS.name,))
    for section, server in config.yaml.sections if config.yaml else ():
        if config.disagg_role and section != ROLE_SECTIONS[config.disagg_role]:
            continue
        beyond = [place for place in without_option(server) if place is not ROUTER]
        _check_section(config, core.needs_model, section, server, beyond)
        if not config.disagg_role:
            lines += _of_the_router(config, section, server)
        unused = without_effect(server, beyond, is_server=bool(config.disagg_role))
        if names := ", ".join(unused):
            lines.append(f"{section}: has no effect on the {config.core_type} core: {names}")
    if core.speculates:
        _check_speculation(config)
        for each in config.sections.values() or [config]:
            if each.speculative_config:
                from mpillm.engine.shape.speculative_config import SpeculativeConfig  # few runs use it

                SpeculativeConfig.read(each.speculative_config)
    if core.needs_model and _finds_nothing(config):
        lines.append(
            "kv_cache_aware finds no cached prompts: reuse is off (--enable_kv_cache_reuse, or"
            " kv_cache_config.enable_block_reuse); it only looks at open requests"
        )
    return lines


def _needs_model(config: RunConfig, core: type[LLMCore]) -> bool:
    return core.needs_model or (config.server is not None and kind_of(config.server).names_model)


def check_leaders_yaml(config: RunConfig) -> list[str]:
    """Check the YAML as `check_yaml` does, for the leader of servers. Servers check their own."""
    if config.yaml is None:
        return []
    routers = [_of_the_router(config, section, server) for section, server in config.yaml.sections]
    return [
        *config.yaml_lines,
        *_of_the_leader(config, LEADER_READS),
        *(line for lines in routers for line in lines),
    ]


def _check_lists(config: RunConfig, of_servers: bool) -> None:
    """Raise ConfigError if a section for servers is a list, or a list's entries have different routers."""
    assert config.yaml is not None
    routers: dict[str, tuple[str, object]] = {}
    for section, server in config.yaml.sections:
        kind = section_kind(section)
        if section != kind and of_servers:
            raise ConfigError(
                f"{config.disagg_config}: {kind} is a list, which is for the instances of one run; of servers"
                " each section is one mapping"
            )
        first, router = routers.setdefault(kind, (section, dict(server.router)))
        if dict(server.router) != router:
            raise ConfigError(
                f"{config.disagg_config}: {section}.router: must be the same as {first}.router; one leader"
                " chooses among the instances of both"
            )


def _of_own_servers(config: RunConfig) -> list[str]:
    assert config.yaml is not None and config.server is not None
    kind = kind_of(config.server)
    lines = _of_the_leader(config, ())
    if DISCOVERY in config.yaml.options:
        lines.append(f"{config.disagg_config}: {DISCOVERY}: servers that the run starts need not register")
    for section, server in config.yaml.sections:
        unused = (name for name in without_effect(server) if name == "urls" or not kind.takes_llm_args)
        if names := ", ".join(unused):
            lines.append(f"{section}: has no effect on a {kind.name} server that the run starts: {names}")
    return lines


def _of_the_leader(config: RunConfig, read: Collection[str]) -> list[str]:
    assert config.yaml is not None
    names = ", ".join(leaders_without_effect(config.yaml, read))
    return [f"{config.disagg_config}: has no effect on mpillm's leader: {names}"] if names else []


def _of_the_router(config: RunConfig, section: str, server: ServerConfig) -> list[str]:
    if ROUTER not in without_option(server):
        return []
    policy = config.in_section(section).traffic_distribution_policy
    return [f"{section}: mpillm has no router {ROUTER.value_in(server)}; it uses {policy} instead"]


def _check_section(
    config: RunConfig, needs_model: bool, section: str, server: ServerConfig, beyond: Collection[YamlKey]
) -> None:
    """Raise ConfigError for a setting that must not be ignored, because it changes the measurement.

    `beyond`: settings that correspond to no option.
    """
    where = f"{config.disagg_config}: {section}"
    if server.context_parallel_size > 1:
        raise ConfigError(
            f"{where}.context_parallel_size {server.context_parallel_size}: must be 1;"
            " mpillm has no context parallelism"
        )
    if not needs_model:
        return
    for place in beyond:
        kinds = ", ".join(place.yaml_names.get(kind, kind) for kind in place.field.choices)
        raise ConfigError(
            f"{where}.{place.name} {place.value_in(server)}: the {config.core_type} core has {kinds}"
        )
    if server.extra.get("quant_config"):
        raise ConfigError(
            f"{where}.quant_config: the {config.core_type} core quantises by the checkpoint or"
            " --quantization; leave it out",
            about=["quantization"],
        )


def _check_speculation(config: RunConfig) -> None:
    """Raise ConfigError for speculative decoding in a workload whose rules forbid it."""
    each = config.sections.values() or [config]
    if config.workload is not None and any(section.speculative_config for section in each):
        why = f"--speculative_config: {speculation_rule(config.workload)}; leave out --benchmarks, or this"
        raise ConfigError(why, about=["speculative_config"])


def _finds_nothing(config: RunConfig) -> bool:
    """Return whether routing is by cached prompts although the first instances do not reuse caches."""
    of = config.entry_section
    return of.traffic_distribution_policy == "kv_cache_aware" and not of.enable_kv_cache_reuse
