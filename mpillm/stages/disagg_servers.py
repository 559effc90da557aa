"""The servers of a disaggregation YAML: workers, which are the ranks of one mpirun, and their leader."""

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
    """Return what this process starts of the YAML at `path`.

    `kind`: worker, leader, or None for both; `launcher`: whose rank this process is, if there are several.
    Raises EveryRankError if it started too few or too many.
    """
    if launcher and kind == "worker":
        return [_worker_rank(programs.worker, path, config, launcher)]
    if launcher:
        what = (
            "one leader is started alone, or by mpirun -n 1"
            if kind
            else f"{LAUNCH_TYPE}=worker makes each a worker"
        )
        raise EveryRankError(
            f"{launcher.name} started {launcher.size or 'several'} ranks of run-llm-server: {what}"
        )
    servers = [] if kind == "leader" else [_workers(programs.worker, path, config)]
    if kind != "worker":
        url = f"{config.hostname}:{config.port}"
        name = "disaggregated leader"
        servers.append(Server(name, Command(programs.leader), {"HTTP": config.port}, (_health(url),), (url,)))
    return servers


def _worker_rank(words: tuple[str, ...], path: str, config: DisaggConfig, launcher: Launcher) -> Server:
    """Return the worker for this process's rank."""
    if launcher.size not in (config.n_workers, None):
        raise EveryRankError(
            f"{path} has {config.n_workers} workers, but {launcher.name} started {launcher.size} ranks;"
            f" start {config.n_workers}"
        )
    rank = launcher.rank or 0
    (mine,) = (one for one in served_instances(config, path) if rank in one.ranks)
    serves = rank == mine.ranks.start  # the others only compute
    return Server(
        f"worker {rank} ({mine.name})",
        Command(words),
        {f"HTTP {mine.url}": int(mine.url.rpartition(":")[2])} if serves else {},
        (_health(mine.url),) if serves else (),
        (mine.url,) if serves else (),
        keeps_job=True,
        log=f"worker_{rank}.log",
    )


def _workers(words: tuple[str, ...], path: str, config: DisaggConfig) -> Server:
    """Return an mpirun of all workers."""
    mpi = detect()
    root, cores = os.geteuid() == 0, usable_cores()
    here = on_this_host(mpi)
    line = command_line(mpi, config.n_workers, words, here, root=root, cores=cores, survive=False)
    urls = tuple(one.url for one in served_instances(config, path))
    ports = {f"HTTP {url}": port for url, port in ports_here(urls).items()}
    return Server("workers", Command(tuple(line)), ports, tuple(map(_health, urls)))


def _health(url: str) -> str:
    return f"http://{url}/health"
