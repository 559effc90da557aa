"""Start a `tritonserver` for each model repository, like TensorRT-LLM's launch_triton_server.py."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from disagg.errors import ConfigError
from disagg.text_file import read_text
from launch.bounded_http import ReplyError, page
from launch.command import Command, NotHere, find_program
from launch.find_mpirun import Mpi, detect
from launch.mpirun import command_line, on_this_host, usable_cores
from launch.safe_text import one_line
from mpillm.stages.servers import Server

PROGRAM = "/opt/tritonserver/bin/tritonserver"
"""Path in NVIDIA's containers."""

_TIMEOUT_S = 10.0


class Repository(NamedTuple):
    """A server's model repository."""

    folder: Path
    ranks: Mapping[str, int]  # GPUs of each model's engine; 1 for a model without GPUs
    is_embedded: bool = False  # the models use the embedded engine

    @property
    def parallel(self) -> list[str]:
        """Names of the models whose engines have several ranks."""
        return [name for name, ranks in self.ranks.items() if ranks > 1]


class Ports(NamedTuple):
    """Ports of one server."""

    http: int
    grpc: int
    metrics: int


def triton_prefix() -> Path:
    """Return the environment of `make triton`, which need not exist.

    MPILLM_TRITON_PREFIX sets it. By default, it is a folder of this Python's environment, or of the parent
    environment (for MPICH's).
    """
    if prefix := os.environ.get("MPILLM_TRITON_PREFIX"):
        return Path(prefix)
    places = [Path(sys.prefix) / "triton", Path(sys.prefix).parent / "triton"]
    return next((place for place in places if (place / "installed").is_file()), places[0])


def find_tritonserver(program: str | None) -> str:
    """Return the program: `program`, from PATH, from NVIDIA's container, or from `make triton`.

    Raises NotHere if there is none.
    """
    paths = (Path(PROGRAM), triton_prefix() / "bin" / "tritonserver")
    installed = next((str(path) for path in paths if path.is_file()), "")
    program = program or shutil.which("tritonserver") or installed
    if not program or not shutil.which(program):
        raise NotHere(f"--tritonserver {program or '(not given)'}: no such program, in PATH or as {PROGRAM}")
    return str(Path(program))


def mpirun_argv(repo: Repository) -> list[str]:
    """Return the mpirun arguments that start a server for each rank of a repository's model; [] for one rank.

    Raises NotHere without an mpirun.
    """
    if not repo.parallel:
        return []
    if repo.is_embedded:
        return embedded_mpirun(max(repo.ranks.values()))
    mpirun = find_program("mpirun", "it starts the ranks of an engine")
    return [mpirun, *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]


def embedded_mpirun(n_ranks: int, *, oversubscribe: bool = False, mpi: Mpi | None = None) -> list[str]:
    """Return the mpirun arguments of the embedded engine's MPI, for `n_ranks` servers on this host."""
    mpi = mpi or detect()
    crowded = mpi.kind == "openmpi" and (oversubscribe or n_ranks > usable_cores())
    options = ["--oversubscribe"] if crowded else []
    options += on_this_host(mpi)
    line = command_line(mpi, 1, [], options, root=os.geteuid() == 0, survive=False)
    return [line[0], *line[3:]]  # without -n 1, which each rank has


def read_repositories(prefix: str) -> list[Repository]:
    """Read the model repositories ``<prefix>_0``, ``<prefix>_1``, …. Raises ConfigError."""
    repos: list[Repository] = []
    while (folder := Path(f"{prefix}_{len(repos)}")).is_dir():
        repos.append(read_repository(folder, "--triton_model_repo"))
    return repos


def read_repository(folder: Path, option: str) -> Repository:
    """Read the model repository of `option`. Raises ConfigError if it has no model or an open placeholder."""
    files = sorted(folder.glob("*/config.pbtxt"))
    if not files:
        raise ConfigError(f"{option}: {folder} has no model in it (a folder with a config.pbtxt)")
    texts = {file.parent.name: read_text(str(file), f"{option}: ") for file in files}
    for file in files:
        if placeholder := _open_placeholder(texts[file.parent.name]):
            raise ConfigError(
                f"{option}: {file}:{placeholder} has no value; fill it with `python -m mpillm fill-template`"
            )
    is_embedded = any('backend: "python"' in text and "gpu_device_ids" in text for text in texts.values())
    return Repository(folder, {name: _ranks_of(text) for name, text in texts.items()}, is_embedded)


# Strings, comments, and placeholders outside them. An unterminated string extends to the end of its line.
_PARTS = re.compile(r""""(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?|#[^\n]*|(\$\{\w*\}?)""")


def _open_placeholder(text: str) -> str:
    """Return the first ``${name}`` outside a string, after its line number; "" if there is none.

    TensorRT-LLM's backend reads a placeholder in a string as a missing value.
    """
    for part in _PARTS.finditer(text):
        if part[1]:
            return f"{text.count(chr(10), 0, part.start()) + 1}: {part[1]}"
    return ""


def _ranks_of(text: str) -> int:
    """Return the number of a model's GPUs, which is its engine's number of ranks; 1 if it lists none."""
    match = re.search(r'"gpu_device_ids"\s*value:?\s*\{\s*string_value:\s*"([^"]*)"', text)
    return len(match[1].split(",")) if match else 1


def default_grpc_ports(n: int) -> list[int]:
    """Return 8001, 8004, …; the HTTP port is one lower and the metrics port one higher."""
    return [8001 + 3 * index for index in range(n)]


def assign_ports(grpc: Sequence[int]) -> list[Ports]:
    """Return all ports of each server: next to a default gRPC port, otherwise above the highest gRPC port."""
    others = (port for port in (*range(max(grpc) + 1, 65536), *range(8000, max(grpc))) if port not in grpc)
    return [
        Ports(port - 1, port, port + 1) if port == default else Ports(next(others), port, next(others))
        for port, default in zip(grpc, default_grpc_ports(len(grpc)), strict=True)
    ]


class ExtraArgs(NamedTuple):
    """Additional arguments, as in launch_triton_server.py."""

    every: Sequence[str] = ()  # for each server
    first: Sequence[str] = ()  # for the server of rank 0
    spawns: bool = True  # the models of an orchestrator start their ranks


def triton_server(
    index: int,
    program: str,
    repo: Repository,
    ports: Ports,
    mpirun: Sequence[str] | None,
    extra: ExtraArgs = ExtraArgs(),  # noqa: B008 - it is frozen
) -> Server:
    """Return server `index`.

    `mpirun`: starts a server for each rank of its model; None: the model starts them.
    """

    def rank_line(rank: int) -> list[str]:
        line = [
            program,
            f"--model-repository={repo.folder}",
            f"--grpc-port={ports.grpc}",
            f"--http-port={ports.http}",
        ]
        line.append(f"--metrics-port={ports.metrics}")
        if rank > 0:  # only computes
            line += ["--model-control-mode=explicit", *(f"--load-model={model}" for model in repo.parallel)]
        else:
            line += extra.first
        line += extra.every
        return [
            *line,
            "--disable-auto-complete-config",
            f"--backend-config=python,shm-region-prefix-name=prefix{index}_{rank}_",
        ]

    argv, env = rank_line(0), {}
    if repo.parallel and mpirun is None:
        env = {
            "TRTLLM_ORCHESTRATOR": "1",
            "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": str(int(extra.spawns)),
        }
    elif mpirun is not None and repo.parallel:
        argv = [*mpirun]
        for rank in range(max(repo.ranks.values())):
            argv += [*([":"] if rank else []), "-n", "1", *rank_line(rank)]
    return Server(
        f"tritonserver {index}",
        Command(tuple(argv), env),
        {"HTTP": ports.http, "gRPC": ports.grpc, "metrics": ports.metrics},
        (f"http://localhost:{ports.http}/v2/health/ready",),
        (f"localhost:{ports.grpc}",),
        table=partial(model_table, f"http://localhost:{ports.http}/v2/repository/index"),
        ends_orphans=bool(mpirun),
        reason=r"^E\d{4} .*failed to load|^error: |noticed that process rank \d+",
        needs="triton_python_backend_stub",
    )


def model_table(url: str) -> list[str]:
    """Return the lines of a table of a server's models, in the form of tritonserver's log.

    If the request fails, return one line with the error.
    """
    rows = [["Model", "Version", "Status"]]
    try:
        _, body = page(url, _TIMEOUT_S, b"{}")
        for model in json.loads(body):
            why = f": {model['reason']}" if model.get("reason") else ""
            row = (model["name"], model.get("version", ""), model.get("state", "UNAVAILABLE") + why)
            rows.append([one_line(text) for text in row])
    except ReplyError as error:
        return [f"{url}: {error}"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return [f"{url}: it sent something that is not a list of models: {one_line(body, 80)}"]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    edge = "+".join(["", *("-" * (width + 2) for width in widths), ""])
    lines = [
        "".join(f"| {text:<{width}} " for text, width in zip(row, widths, strict=True)) + "|" for row in rows
    ]
    return [edge, lines[0], edge, *lines[1:], edge]
