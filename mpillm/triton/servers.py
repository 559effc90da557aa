"""Servers that `run-llm-server` starts for Triton: a `tritonserver` for each model repository."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from disagg.errors import ConfigError, about
from launch.command import NotHere
from mpillm.nvidia.configs import TritonHarnessConfig
from mpillm.options.mitten import configured
from mpillm.options.run_config import RunConfig
from mpillm.stages.preconditions import raise_or_note
from mpillm.stages.servers import Server, ports_here
from mpillm.triton.repository import triton_stages
from mpillm.triton.tritonserver import (
    ExtraArgs,
    Repository,
    assign_ports,
    default_grpc_ports,
    find_tritonserver,
    mpirun_argv,
    read_repositories,
    triton_server,
)


def triton_servers(config: RunConfig, argv: Sequence[str]) -> list[Server]:
    """Return a `tritonserver` for each model repository."""
    if config.triton_skip_server_spawn:
        raise ConfigError(
            "--triton_skip_server_spawn: the servers run already, so there is nothing to start",
            about=["triton_skip_server_spawn"],
        )
    repos = _repositories(config)
    try:
        program = find_tritonserver(config.tritonserver)
    except NotHere as error:
        raise_or_note(config, error)
        program = config.tritonserver or "tritonserver"
    ports = assign_ports(_grpc_ports(config, len(repos)))
    more = ExtraArgs([f"--{port}-address={config.server_host}" for port in ("http", "grpc", "metrics")])
    return [
        triton_server(index, program, repo, ports[index], _mpirun(config, repo), more)
        for index, repo in enumerate(repos)
    ]


def _mpirun(config: RunConfig, repo: Repository) -> list[str] | None:
    """Return the mpirun arguments that start a server for each rank; None if the models start their ranks.

    mpirun supports one model with several ranks, TensorRT-LLM's backend several.
    """
    if len(repo.parallel) > 1 or config.triton_orchestrator:
        return None
    try:
        return mpirun_argv(repo)
    except NotHere as error:
        raise_or_note(config, error)
        return ["mpirun"]


def _repositories(config: RunConfig) -> list[Repository]:
    """Return the existing repositories; without any, a dry run assumes generated ones."""
    repos = read_repositories(config.triton_model_repo)
    if not repos:
        folder = f"{config.triton_model_repo}_0"
        problem = (
            f"--triton_model_repo {config.triton_model_repo}: there is no {folder};"
            " generate-triton-config makes it"
        )
        raise_or_note(config, NotHere(problem))
        stages = triton_stages(config)
        print(
            f"# assumed: {', '.join(str(stage.output) for stage in stages)}, as generate-triton-config"
            " writes them"
        )
        return [
            Repository(
                stage.output,
                dict.fromkeys(stage.names, stage.layout.gpus_per_model),
                stage.embedded is not None,
            )
            for stage in stages
        ]
    if config.triton_num_servers not in (None, len(repos)):
        raise ConfigError(
            f"--triton_num_servers {config.triton_num_servers}, but there are {len(repos)} model"
            f" repositories, {repos[0].folder} …",
            about=["triton_num_servers"],
        )
    return repos


@about("triton_grpc_ports", "triton_server_urls")
def _grpc_ports(config: RunConfig, n: int) -> list[int]:
    """Return the gRPC port of each server of this host, from the options or by default."""
    urls = configured(TritonHarnessConfig, config).server_urls
    if not urls:
        return default_grpc_ports(n)
    source = "--triton_grpc_ports" if config.triton_grpc_ports else "--triton_server_urls"
    ports = [*ports_here(urls).values()]
    if len(ports) != n:
        raise ConfigError(
            f"{source} names {len(ports)} servers on this host ({socket.gethostname()}), and there are {n}"
            " model repositories"
        )
    return ports
