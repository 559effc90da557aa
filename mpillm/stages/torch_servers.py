"""Servers that `run-llm-server` starts for the embedded engine: a YAML's workers and their leader."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from disagg.errors import ConfigError
from launch.environment import launch_type
from launch.launcher import one_of_several
from mpillm.options.run_config import RunConfig
from mpillm.stages.disagg_servers import Programs, disaggregated_servers
from mpillm.stages.disagg_workers import yaml_of_servers
from mpillm.stages.servers import Server

_LEADERS_SHARE = 0.9  # of --load_deadline: the leader reports a missing server before this command times out


def torch_servers(config: RunConfig, argv: Sequence[str]) -> list[Server]:
    """Return workers, leader or both. They receive the command's arguments."""
    path = config.disagg_config
    if not path:
        raise ConfigError(
            f"--core_type {config.core_type} serves the instances of a disaggregation YAML: name"
            " --disagg_config, which generate-disagg-config writes (one server for all is `mpillm serve`)",
            about=["core_type"],
        )
    yaml = yaml_of_servers(config, path)
    serve = (sys.executable, "-m", "mpillm", "serve", *argv, f"--disagg_config={path}")
    leader = (*serve, "--server_role=leader", f"--load_deadline={_LEADERS_SHARE * config.load_deadline:g}")
    programs = Programs((*serve, "--server_role=worker"), leader)
    return disaggregated_servers(programs, path, yaml, launch_type(), one_of_several())
