"""`tritonserver`: one for each model repository, as TensorRT-LLM's launch_triton_server.py starts it."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from disagg.errors import ConfigError
from launch.command import Command, NotHere
from launch.servers import Server

PROGRAM = "/opt/tritonserver/bin/tritonserver"
"""Where NVIDIA's containers have it."""


_ASK_S = 10.0


class Repository(NamedTuple):
    """A server's model repository, its models, and the number of ranks (GPUs) of the largest of them."""

    folder: Path
    models: list[str]
    ranks: int

    @property
    def needs_mpirun(self) -> bool:
        """Whether mpirun starts the ranks of its model. With several models, TensorRT-LLM's backend does."""
        return self.ranks > 1 and len(self.models) == 1


class Ports(NamedTuple):
    """Those of one server."""

    http: int
    grpc: int
    metrics: int


def find_tritonserver(given: str | None) -> str:
    """Return the program: `given`, in PATH, where NVIDIA's containers have it, or from `make triton`.

    NotHere if it is not there.
    """
    made = f"{sys.prefix}/triton/bin/tritonserver"
    there = [path for path in (PROGRAM, made) if Path(path).is_file()]
    program = given or shutil.which("tritonserver") or next(iter(there), "")
    if not program or not shutil.which(program):
        raise NotHere(f"--tritonserver {program or '(not given)'}: no such program, in PATH or as {PROGRAM}")
    return str(Path(program))


def read_repositories(prefix: str) -> list[Repository]:
    """Read the model repositories ``<prefix>_0``, ``<prefix>_1``, ….

    Raises ConfigError for one without a model.
    """
    repos: list[Repository] = []
    while (folder := Path(f"{prefix}_{len(repos)}")).is_dir():
        files = sorted(folder.glob("*/config.pbtxt"))
        if not files:
            raise ConfigError(
                f"--triton_model_repo: {folder} has no model in it (a folder with a config.pbtxt)"
            )
        repos.append(Repository(folder, [file.parent.name for file in files], max(map(_ranks_of, files))))
    return repos


def _ranks_of(file: Path) -> int:
    """Return the GPUs of a model, which are its engine's ranks; 1 if it does not say."""
    match = re.search(
        r'"gpu_device_ids"\s*value:?\s*\{\s*string_value:\s*"([^"]*)"', file.read_text(encoding="utf-8")
    )
    return len(match[1].split(",")) if match else 1


def default_grpc_ports(n: int) -> list[int]:
    """Return 8001, 8004, …: with its HTTP port below and its metrics port above, each server has three."""
    return [8001 + 3 * index for index in range(n)]


def ports_beside(grpc: Sequence[int]) -> list[Ports]:
    """Return all ports of each server: neighbours of a default gRPC port, else numbers above the highest."""
    others = (port for port in (*range(max(grpc) + 1, 65536), *range(8000, max(grpc))) if port not in grpc)
    return [
        Ports(port - 1, port, port + 1) if port == default else Ports(next(others), port, next(others))
        for port, default in zip(grpc, default_grpc_ports(len(grpc)), strict=True)
    ]


def triton_server(index: int, program: str, repo: Repository, ports: Ports, mpirun: str) -> Server:
    """Return server `index`, under `mpirun` if its model has several ranks."""

    def rank_line(rank: int) -> list[str]:
        line = [
            program,
            f"--model-repository={repo.folder}",
            f"--grpc-port={ports.grpc}",
            f"--http-port={ports.http}",
        ]
        line.append(f"--metrics-port={ports.metrics}")
        if rank > 0:  # these ranks only compute
            line += ["--model-control-mode=explicit", *(f"--load-model={model}" for model in repo.models)]
        return [
            *line,
            "--disable-auto-complete-config",
            f"--backend-config=python,shm-region-prefix-name=prefix{index}_{rank}_",
        ]

    words, env = rank_line(0), {}
    if repo.needs_mpirun:
        words = [mpirun, *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
        for rank in range(repo.ranks):
            words += [*([":"] if rank else []), "-n", "1", *rank_line(rank)]
    elif repo.ranks > 1:
        env = {"TRTLLM_ORCHESTRATOR": "1", "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": "1"}
    return Server(
        f"tritonserver {index}",
        Command(tuple(words), env),
        {"HTTP": ports.http, "gRPC": ports.grpc, "metrics": ports.metrics},
        (f"http://localhost:{ports.http}/v2/health/ready",),
        (f"localhost:{ports.grpc}",),
        index=f"http://localhost:{ports.http}/v2/repository/index",
        reason=r"^E\d{4} .*failed to load|^error: ",
    )


def model_table(url: str) -> list[str]:
    """Return the lines of a table of the models in a server's repository index, as tritonserver logs it.

    Without an answer, one line says so.
    """
    request = urllib.request.Request(url, b"{}", {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_ASK_S) as answer:
            models = json.load(answer)
    except (OSError, ValueError, http.client.HTTPException) as error:
        return [f"{url}: {error}"]
    rows = [("Model", "Version", "Status")]
    for model in models:
        why = f": {model['reason']}" if model.get("reason") else ""
        rows.append((model["name"], model.get("version", ""), model.get("state", "UNAVAILABLE") + why))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    edge = "+".join(["", *("-" * (width + 2) for width in widths), ""])
    lines = [
        "".join(f"| {text:<{width}} " for text, width in zip(row, widths, strict=True)) + "|" for row in rows
    ]
    return [edge, lines[0], edge, *lines[1:], edge]
