"""The servers of a disaggregation YAML: workers (the ranks of one mpirun) and their leader."""

from __future__ import annotations

import os
from typing import NamedTuple

from disagg import DisaggConfig
from disagg.instances import served_instances
from launch.command import Command
from launch.environment import LAUNCH_TYPE
from launch.find_mpirun import detect
from launch.launcher import EveryRankError, Launcher
from launch.mpirun import command_line, on_this_host, usable_cores
from mpillm.stages.servers import Server, ports_here


class Programs(NamedTuple):
    """Command lines."""

    worker: tuple[str, ...]  # of each rank of the mpirun
    leader: tuple[str, ...]


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
        return [_worker_rank(programs.worker, path, config, launcher)]
    if launcher:
        remedy = (
            "start one leader alone, or by mpirun -n 1"
            if kind
            else f"{LAUNCH_TYPE}=worker makes each a worker"
        )
        raise EveryRankError(
            f"{launcher.name} started {launcher.size or 'several'} ranks of run-llm-server: {remedy}"
        )
    servers = [] if kind == "leader" else [_workers(programs.worker, path, config)]
    if kind != "worker":
        url = f"{config.hostname}:{config.port}"
        name = "disaggregated leader"
        servers.append(Server(name, Command(programs.leader), {"HTTP": config.port}, (_health(url),), (url,)))
    return servers


def _worker_rank(argv: tuple[str, ...], path: str, config: DisaggConfig, launcher: Launcher) -> Server:
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
        Command(argv),
        {f"HTTP {instance.url}": int(instance.url.rpartition(":")[2])} if serves else {},
        (_health(instance.url),) if serves else (),
        (instance.url,) if serves else (),
        keeps_job=True,
        log=f"worker_{rank}.log",
    )


def _workers(argv: tuple[str, ...], path: str, config: DisaggConfig) -> Server:
    """Return an mpirun of all workers."""
    mpi = detect()
    root, cores = os.geteuid() == 0, usable_cores()
    here = on_this_host(mpi)
    line = command_line(mpi, config.n_workers, argv, here, root=root, cores=cores, survive=False)
    urls = tuple(one.url for one in served_instances(config, path))
    ports = {f"HTTP {url}": port for url, port in ports_here(urls).items()}
    return Server("workers", Command(tuple(line)), ports, tuple(map(_health, urls)))


def _health(url: str) -> str:
    return f"http://{url}/health"
