"""A disaggregation YAML for workers on hosts that are known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import disagg
from disagg import DisaggConfig
from disagg.errors import ConfigError
from launch.command import NotHere
from launch.environment import launch_type
from launch.launcher import one_of_several
from mpillm.options.disagg_yaml import generated
from mpillm.options.run_config import RunConfig
from mpillm.stages.preconditions import lacking


def yaml_of_servers(config: RunConfig, path: str) -> DisaggConfig:
    """Return the YAML of servers to start; in a dry run without it, what generate-disagg-config would write.

    Raises ConfigError if it is not there, or has no context and generation servers.
    """
    if Path(path).exists():
        yaml = config.with_yaml().yaml
        assert yaml is not None
    else:
        lacking(config, NotHere(f"--disagg_config {path}: no such file; generate-disagg-config writes it"))
        launcher = one_of_several() if launch_type() == "worker" else None
        yaml = on_this_host(config, launcher.size if launcher else None)
        made = f"as generate-disagg-config writes it for {yaml.n_workers} workers on this host"
        print(f"# assumed: {path}, {made}")
    if yaml.mode != "disaggregated":
        raise ConfigError(f"{path}: {yaml.mode}; it needs context_servers and generation_servers")
    return yaml


def on_this_host(config: RunConfig, n_workers: int | None) -> DisaggConfig:
    """Return the configuration for workers on this host; None: as many as the options make instances for."""
    return for_workers(config, ["localhost"] * (n_workers or generated(config, None).n_workers))


def for_workers(config: RunConfig, hosts: Sequence[str]) -> DisaggConfig:
    """Return the configuration for workers on these hosts, in rank order, with URLs.

    Raises ConfigError if the options need another number of workers.
    """
    made = generated(config, len(hosts), control_ranks=0)
    if made.mode != "disaggregated":
        raise ConfigError(
            f"--mode {made.mode}: trtllm-serve's workers are disaggregated; name --mode disaggregated or"
            " --core_type trtllm_disagg",
            about=["mode"],
        )
    first = 0
    of_instances: list[str] = []
    for _, server in made.sections:
        of_instances += hosts[first : first + server.n_workers : server.ranks_per_instance]
        first += server.n_workers
    return disagg.with_hosts(made, hosts[0], of_instances)
