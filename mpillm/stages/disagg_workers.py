"""A disaggregation YAML for workers on known hosts."""

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
from mpillm.stages.preconditions import raise_or_note


def yaml_of_servers(config: RunConfig, path: str) -> DisaggConfig:
    """Return the YAML of the servers to start.

    If the file is missing in a dry run, return the output of generate-disagg-config. Raises ConfigError if
    the file is missing, or has no context and generation servers.
    """
    if Path(path).exists():
        yaml = config.with_yaml().yaml
        assert yaml is not None
    else:
        raise_or_note(
            config, NotHere(f"--disagg_config {path}: no such file; generate-disagg-config writes it")
        )
        launcher = one_of_several() if launch_type() == "worker" else None
        yaml = on_this_host(config, launcher.size if launcher else None)
        content = f"the output of generate-disagg-config for {yaml.n_workers} workers on this host"
        print(f"# assumed: {path}, {content}")
    if yaml.mode != "disaggregated":
        raise ConfigError(f"{path}: {yaml.mode}; it needs context_servers and generation_servers")
    return yaml


def on_this_host(config: RunConfig, n_workers: int | None) -> DisaggConfig:
    """Return the configuration for workers on this host. `n_workers`: None: the number from the options."""
    return for_workers(config, ["localhost"] * (n_workers or generated(config, None).n_workers))


def for_workers(config: RunConfig, hosts: Sequence[str]) -> DisaggConfig:
    """Return the configuration for workers on these hosts, in rank order, with URLs.

    Raises ConfigError if the options need another number of workers.
    """
    yaml = generated(config, len(hosts), control_ranks=0)
    if yaml.mode != "disaggregated":
        raise ConfigError(
            f"--mode {yaml.mode}: trtllm-serve's workers are disaggregated; name --mode disaggregated or"
            " --core_type trtllm_disagg",
            about=["mode"],
        )
    first = 0
    instance_hosts: list[str] = []
    for _, server in yaml.sections:
        instance_hosts += hosts[first : first + server.n_workers : server.ranks_per_instance]
        first += server.n_workers
    return disagg.with_hosts(yaml, hosts[0], instance_hosts)
