"""Server kind `tritonserver`, with a model repository of `generate-triton-config`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from disagg.errors import ConfigError
from launch.command import KnownFailure
from mpillm.programs.servers.kind import ServerKind, ServerSpec
from mpillm.triton.tritonserver import (
    ExtraArgs,
    Ports,
    find_tritonserver,
    mpirun_argv,
    read_repository,
    triton_server,
)

GRPC, METRICS = "grpc", "metrics"


def _arguments(spec: ServerSpec) -> Sequence[str]:
    folder = Path(f"{spec.model}_{spec.place}")
    try:
        repo = read_repository(folder, "--triton_model_repo")
        program = find_tritonserver(spec.program)
    except ConfigError as error:
        raise ValueError(f"{error}; generate-triton-config makes a repository for each server") from None
    extra = ExtraArgs([f"--{port}-address={spec.host}" for port in ("http", GRPC, METRICS)])
    if len(repo.parallel) > 1:
        raise ValueError(f"{folder} has several models of several ranks: run-llm-server starts such a server")
    http, grpc, metrics = spec.port, spec.more_ports[GRPC], spec.more_ports[METRICS]
    ports = Ports(cast(int, http), cast(int, grpc), cast(int, metrics))  # placeholders in a dry run
    return triton_server(spec.place, program, repo, ports, mpirun_argv(repo), extra).command.argv


TRITONSERVER = ServerKind(
    name="tritonserver",
    arguments=_arguments,
    options={},
    health="/v2/health/ready",
    failures=(
        KnownFailure(
            r"unable to find backend library for backend 'tensorrtllm'",
            "it has no backend for engines, as in releases of TensorRT-LLM after 1.3.0rc20",
            "use a container with 1.2, or the model.yaml of the LLM API backend",
        ),
        KnownFailure(r"module compiled using NumPy 1", "its Python has NumPy 2", "give it numpy<2"),
        KnownFailure(
            r"failed to read text proto from",
            "it could not read the config.pbtxt of a model",
            "correct the file that its log names",
        ),
        KnownFailure(
            r"failed to load '[^']*' version \d+|UNAVAILABLE: ",
            "it could not load a model",
            "look at the lines with 'failed to load' in its log",
        ),
    ),
    core_type="triton_grpc",
    model_option="triton_model_repo",
    more_ports=(GRPC, METRICS),
    client_port=GRPC,
    metrics_port=METRICS,
    takes_gpus=False,  # the repository assigns GPUs to models
)
