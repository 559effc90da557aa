"""`trtllm-serve`: endpoints, and the two halves of disaggregated serving."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from disagg import DisaggConfig
from disagg.errors import ConfigError
from launch.command import Command
from launch.launcher import EveryRankError, Launcher
from launch.mpirun import command_line, detect, usable_cores
from launch.servers import Server, ports_here

INSTALL = "install TensorRT-LLM, as in NVIDIA's containers"
FIRST_PORT = 30000
"""Of the first endpoint, as in the reference harness."""


def endpoints(
    program: str,
    model: Sequence[str],
    ports: Sequence[int],
    options: Mapping[str, object],
    extra: tuple[Path, str],
    n_ranks: int,
    n_gpus: int | None,
) -> list[Server]:
    """An endpoint on each port of this host, each on `n_ranks` of the `n_gpus` visible GPUs (None: unknown).

    `model`: the model's words on the command line. `options`: by name, without those that are None. `extra`:
    the file of LLM arguments.
    """
    servers = []
    for index, port in enumerate(ports):
        words = [program, "serve", *model, "--host", "0.0.0.0", "--port", str(port)]
        words += [
            word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))
        ]
        words += ["--extra_llm_api_options", str(extra[0])]
        env = {}
        if n_gpus is not None and len(ports) > 1:
            ours = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(n_gpus)))).split(",")
            env["CUDA_VISIBLE_DEVICES"] = ",".join(ours[index * n_ranks : (index + 1) * n_ranks])
        url = f"localhost:{port}"
        command = Command(tuple(words), env)
        servers.append(
            Server(f"trtllm-serve {index}", command, {"HTTP": port}, (_health(url),), (url,), dict([extra]))
        )
    return servers


def leader(program: str, path: str, config: DisaggConfig, ready_s: float, request_s: float) -> Server:
    """The leader for the YAML at `path`. It gives workers `ready_s` to start and a request `request_s`."""
    words = (program, "disaggregated", "-c", path, "-t", str(int(ready_s)), "-r", str(int(request_s)))
    url = f"{config.hostname}:{config.port}"
    return Server("disaggregated leader", Command(words), {"HTTP": config.port}, (_health(url),), (url,))


def worker_rank(program: str, path: str, config: DisaggConfig, launcher: Launcher) -> Server:
    """The worker for this process's rank of `launcher`. EveryRankError: it started too few or too many."""
    if launcher.size not in (config.n_workers, None):
        raise EveryRankError(
            f"{path} has {config.n_workers} workers, but {launcher.name} started {launcher.size} ranks;"
            f" start {config.n_workers}"
        )
    rank = launcher.rank
    mine = tuple(url for first, url in _urls(path, config) if first == rank)
    ports = {f"HTTP {url}": int(url.rpartition(":")[2]) for url in mine}
    return Server(
        f"worker {rank}",
        Command(_worker(program, path)),
        ports,
        tuple(map(_health, mine)),
        mine,
        keeps_job=True,
    )


def workers(program: str, path: str, config: DisaggConfig) -> Server:
    """An mpirun of all workers."""
    words = _worker(program, path)
    line = command_line(
        detect(), config.n_workers, words, root=os.geteuid() == 0, cores=usable_cores(), survive=False
    )
    urls = tuple(url for _, url in _urls(path, config))
    ports = {f"HTTP {url}": port for url, port in ports_here(urls).items()}
    return Server("workers", Command(tuple(line)), ports, tuple(map(_health, urls)))


def _worker(program: str, path: str) -> tuple[str, ...]:
    return (program, "disaggregated_mpi_worker", "-c", path)


def _health(url: str) -> str:
    return f"http://{url}/health"


def _urls(path: str, config: DisaggConfig) -> list[tuple[int, str]]:
    """First rank and URL of each instance, in the file's order."""
    found, first = [], 0
    for name, server in config.sections:
        if not server.urls:
            raise ConfigError(f"{path}: {name} has no urls, which trtllm-serve needs")
        for url in server.urls:
            found.append((first, url))
            first += server.ranks_per_instance
    return found
