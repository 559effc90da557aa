"""`tritonserver`: one for each model repository, as TensorRT-LLM's launch_triton_server.py starts it."""

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
from launch.find_mpirun import detect
from launch.mpirun import command_line, on_this_host, usable_cores
from launch.outside import one_line
from mpillm.stages.servers import Server

PROGRAM = "/opt/tritonserver/bin/tritonserver"
"""Where NVIDIA's containers have it."""

_ASK_S = 10.0


class Repository(NamedTuple):
    """A server's model repository."""

    folder: Path
    ranks: Mapping[str, int]  # of each model: the GPUs of its engine; 1 without one
    is_embedded: bool = False  # whether its engines are ours

    @property
    def models(self) -> list[str]:
        """Their names."""
        return [*self.ranks]

    @property
    def parallel(self) -> list[str]:
        """Models whose engines have several ranks."""
        return [name for name, ranks in self.ranks.items() if ranks > 1]


class Ports(NamedTuple):
    """Those of one server."""

    http: int
    grpc: int
    metrics: int


def made_prefix() -> Path:
    """Return the environment that `make triton` makes: in this Python's one, or beside it (that of MPICH).

    MPILLM_TRITON_PREFIX names another. It is a folder that need not be there.
    """
    given = os.environ.get("MPILLM_TRITON_PREFIX")
    places = [Path(given)] if given else [Path(sys.prefix) / "triton", Path(sys.prefix).parent / "triton"]
    return next((place for place in places if (place / "installed").is_file()), places[0])


def find_tritonserver(given: str | None) -> str:
    """Return the program: `given`, in PATH, where NVIDIA's containers have it, or from `make triton`.

    NotHere if it is not there.
    """
    made = made_prefix() / "bin" / "tritonserver"
    there = [str(path) for path in (Path(PROGRAM), made) if path.is_file()]
    program = given or shutil.which("tritonserver") or next(iter(there), "")
    if not program or not shutil.which(program):
        raise NotHere(f"--tritonserver {program or '(not given)'}: no such program, in PATH or as {PROGRAM}")
    return str(Path(program))


def mpirun_words(repo: Repository) -> list[str]:
    """Return how the line begins that starts a server for each rank of a repository's model; none is needed
    for one rank. Raises NotHere without an mpirun."""
    if not repo.parallel:
        return []
    if repo.is_embedded:
        return embedded_mpirun(max(repo.ranks.values()))
    mpirun = find_program("mpirun", "it starts the ranks of an engine")
    return [mpirun, *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]


def embedded_mpirun(n_ranks: int, *, oversubscribe: bool = False) -> list[str]:
    """Return how the line of the embedded engine's MPI begins, for `n_ranks` servers on this host."""
    mpi = detect()
    crowded = mpi.kind == "openmpi" and (oversubscribe or n_ranks > usable_cores())
    options = ["--oversubscribe"] if crowded else []
    options += on_this_host(mpi)
    line = command_line(mpi, 1, [], options, root=os.geteuid() == 0, survive=False)
    return [line[0], *line[3:]]  # without -n 1, which each rank has


def read_repositories(prefix: str) -> list[Repository]:
    """Read the model repositories ``<prefix>_0``, ``<prefix>_1``, ….

    Raises ConfigError for one without a model.
    """
    repos: list[Repository] = []
    while (folder := Path(f"{prefix}_{len(repos)}")).is_dir():
        repos.append(read_repository(folder, "--triton_model_repo"))
    return repos


def read_repository(folder: Path, option: str) -> Repository:
    """Read a model repository, which `option` names. Raises ConfigError for one without a model."""
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


# Strings, comments, and placeholders outside them. A string that does not end goes on to its line's end.
_PARTS = re.compile(r""""(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?|#[^\n]*|(\$\{\w*\}?)""")


def _open_placeholder(text: str) -> str:
    """Return the first ``${name}`` that is not text, behind the number of its line; "" if there is none.

    In text TensorRT-LLM's backend reads one as a value that was left out.
    """
    for part in _PARTS.finditer(text):
        if part[1]:
            return f"{text.count(chr(10), 0, part.start()) + 1}: {part[1]}"
    return ""


def _ranks_of(text: str) -> int:
    """Return the GPUs of a model, which are its engine's ranks; 1 if it does not say."""
    match = re.search(r'"gpu_device_ids"\s*value:?\s*\{\s*string_value:\s*"([^"]*)"', text)
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


class More(NamedTuple):
    """What launch_triton_server.py can say besides."""

    every: Sequence[str] = ()  # words for each server
    first: Sequence[str] = ()  # and for that of rank 0
    spawns: bool = True  # the models of an orchestrator start their ranks


def triton_server(
    index: int,
    program: str,
    repo: Repository,
    ports: Ports,
    mpirun: Sequence[str] | None,
    more: More = More(),  # noqa: B008 - it is frozen
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
        if rank > 0:  # these ranks only compute
            line += ["--model-control-mode=explicit", *(f"--load-model={model}" for model in repo.parallel)]
        else:
            line += more.first
        line += more.every
        return [
            *line,
            "--disable-auto-complete-config",
            f"--backend-config=python,shm-region-prefix-name=prefix{index}_{rank}_",
        ]

    words, env = rank_line(0), {}
    if repo.parallel and mpirun is None:
        env = {
            "TRTLLM_ORCHESTRATOR": "1",
            "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": str(int(more.spawns)),
        }
    elif mpirun is not None and repo.parallel:
        words = [*mpirun]
        for rank in range(max(repo.ranks.values())):
            words += [*([":"] if rank else []), "-n", "1", *rank_line(rank)]
    return Server(
        f"tritonserver {index}",
        Command(tuple(words), env),
        {"HTTP": ports.http, "gRPC": ports.grpc, "metrics": ports.metrics},
        (f"http://localhost:{ports.http}/v2/health/ready",),
        (f"localhost:{ports.grpc}",),
        table=partial(model_table, f"http://localhost:{ports.http}/v2/repository/index"),
        ends_orphans=bool(mpirun),
        reason=r"^E\d{4} .*failed to load|^error: |noticed that process rank \d+",
    )


def model_table(url: str) -> list[str]:
    """Return the lines of a table of the models in a server's repository index, as tritonserver logs it.

    Without an answer, one line says so.
    """
    rows = [["Model", "Version", "Status"]]
    try:
        _, body = page(url, _ASK_S, b"{}")
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
