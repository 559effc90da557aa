"""The servers of a disaggregation YAML: workers (the ranks of one mpirun) and their leader."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from disagg import DisaggConfig
from disagg.errors import ConfigError
from disagg.instances import served_instances
from launch.command import Command
from launch.environment import LAUNCH_TYPE, launch_type, without_secrets
from launch.find_mpirun import detect
from launch.launcher import EveryRankError, Launcher, one_of_several
from launch.mpirun import command_line, on_this_host, usable_cores
from mpillm.options.run_config import RunConfig
from mpillm.stages.disagg_workers import yaml_of_servers
from mpillm.stages.servers import Server, ports_here

_LEADERS_SHARE = 0.9  # of --load_deadline: the leader reports a missing server before this command times out


def torch_servers(config: RunConfig, argv: Sequence[str]) -> list[Server]:
    """Return workers, leader or both for the embedded engine. They receive the command's arguments."""
    path = config.disagg_config
    if not path:
        raise ConfigError(
            f"--core_type {config.core_type} serves the instances of a disaggregation YAML: name"
            " --disagg_config, which generate-disagg-config writes (one server for all is `mpillm serve`)",
            about=["core_type"],
        )
    yaml = yaml_of_servers(config, path)
    others, secrets = without_secrets(argv)
    serve = (sys.executable, "-m", "mpillm", "serve", *others, f"--disagg_config={path}")
    leader = (*serve, "--server_role=leader", f"--load_deadline={_LEADERS_SHARE * config.load_deadline:g}")
    programs = Programs((*serve, "--server_role=worker"), leader, secrets)
    return disaggregated_servers(programs, path, yaml, launch_type(), one_of_several())


class Programs(NamedTuple):
    """Command lines, and the variables of both."""

    worker: tuple[str, ...]  # of each rank of the mpirun
    leader: tuple[str, ...]
    env: Mapping[str, str] = MappingProxyType({})


def disaggregated_servers(
    programs: Programs, path: str, config: DisaggConfig, kind: str | None, launcher: Launcher | None
) -> list[Server]:
    """Return the servers of the YAML at `path` that this process starts.

    Args:
        kind: worker, leader, or None for both.
        launcher: The launcher of this rank, if it started several ranks.

    Raises: EveryRankError for a wrong number of ranks.
    """
    if launcher and kind == "worker":
        return [_worker_rank(programs, path, config, launcher)]
    if launcher:
        alone = "start one leader alone, or by mpirun -n 1"
        remedy = alone if kind else f"{LAUNCH_TYPE}=worker makes each a worker"
        raise EveryRankError(
            f"{launcher.name} started {launcher.size or 'several'} ranks of run-llm-server: {remedy}"
        )
    servers = [] if kind == "leader" else [_workers(programs, path, config)]
    if kind != "worker":
        url = f"{config.hostname}:{config.port}"
        name = "disaggregated leader"
        command = Command(programs.leader, programs.env)
        servers.append(Server(name, command, {"HTTP": config.port}, (_health(url),), (url,)))
    return servers


def _worker_rank(programs: Programs, path: str, config: DisaggConfig, launcher: Launcher) -> Server:
    """Return the worker for this process's rank."""
    if launcher.size not in (config.n_workers, None):
        raise EveryRankError(
            f"{path} has {config.n_workers} workers, but {launcher.name} started {launcher.size} ranks;"
            f" start {config.n_workers}"
        )
    rank = launcher.rank or 0
    (instance,) = (one for one in served_instances(config, path) if rank in one.ranks)
    serves = rank == instance.ranks.start  # the instance's other ranks only compute
    return Server(
        f"worker {rank} ({instance.name})",
        Command(programs.worker, programs.env),
        {f"HTTP {instance.url}": int(instance.url.rpartition(":")[2])} if serves else {},
        (_health(instance.url),) if serves else (),
        (instance.url,) if serves else (),
        keeps_job=True,
        log=f"worker_{rank}.log",
    )


def _workers(programs: Programs, path: str, config: DisaggConfig) -> Server:
    """Return an mpirun of all workers."""
    mpi = detect()
    root, cores = os.geteuid() == 0, usable_cores()
    here = on_this_host(mpi)
    line = command_line(mpi, config.n_workers, programs.worker, here, root=root, cores=cores, survive=False)
    urls = tuple(one.url for one in served_instances(config, path))
    ports = {f"HTTP {url}": port for url, port in ports_here(urls).items()}
    return Server("workers", Command(tuple(line), programs.env), ports, tuple(map(_health, urls)))


def _health(url: str) -> str:
    return f"http://{url}/health"
