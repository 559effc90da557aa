"""``python -m mpillm launch-triton-server``: TensorRT-LLM's launch_triton_server.py, with its options.

Unlike the script, it waits until the server is ready, prints a table of its models, and keeps running until
the server ends. When it is stopped, it stops the server.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import psutil

from disagg.errors import ConfigError
from launch.command import NotHere
from launch.default_paths import SERVERS
from mpillm.devices import visible_gpus
from mpillm.errors import ExitCode
from mpillm.options.command_line import Parser
from mpillm.options.field import option
from mpillm.options.fields.deadlines import DeadlineFields
from mpillm.options.fields.general import GeneralFields
from mpillm.options.fields.results import OutputFields
from mpillm.options.fields.servers import ServerFields
from mpillm.options.fields.topology import TopologyFields
from mpillm.options.parsers import boolean, natural, positive, seconds
from mpillm.options.values import Values, collect
from mpillm.stages.commands.run_llm_server import run_servers
from mpillm.triton.tritonserver import (
    ExtraArgs,
    Ports,
    Repository,
    embedded_mpirun,
    find_tritonserver,
    read_repository,
    triton_server,
)

_GROUP = "launch-triton-server"


class _Options(Values, group=_GROUP):
    """Options of ``launch-triton-server``: the script's, then additional ones."""

    world_size = TopologyFields.world_size.but(
        "ranks of the engine, each with a tritonserver", default=1, group=_GROUP
    )
    tritonserver = ServerFields.tritonserver.but("the program [default: as of run-llm-server]", group=_GROUP)
    grpc_port = option("where gRPC listens", positive, default=8001)
    http_port = option("where HTTP listens", positive, default=8000)
    metrics_port = option("where metrics are", positive, default=8002)
    force = GeneralFields.force.but(
        "start it also where another tritonserver runs", default=False, aliases=("f",), group=_GROUP
    )
    log = option("have rank 0 log much, to --log_file", boolean, default=False)
    log_file = option("of --log", default="triton_log.txt")
    no_mpi = option("start one server without mpirun", boolean, default=False)
    model_repo = option("the model repository")
    tensorrt_llm_model_name = option(
        "models that ranks above 0 load, separated by commas [default: those with several ranks]"
    )
    multi_model = option(
        "several models, which start their ranks themselves (orchestrator mode)", boolean, default=False
    )
    disable_spawn_processes = option("with --multi_model: they start none", boolean, default=False)
    multimodal_gpu0_cuda_mem_pool_bytes = option("CUDA memory pool of GPU 0", natural, default=0)
    oversubscribe = option("give mpirun this option of Open MPI's", boolean, default=False)
    dry_run = GeneralFields.dry_run.but("print the command without running it", default=False, group=_GROUP)
    log_dir = OutputFields.log_dir.but(f"for its output [default: {SERVERS}/<time>]", group=_GROUP)
    load_deadline = option("time to get ready", seconds, default=1800.0)
    stall_timeout = DeadlineFields.stall_timeout.but(
        "longest time without an answer to a health check", default=300.0, group=_GROUP
    )


def main(argv: Sequence[str]) -> int:
    """Run the server. Return NOT_READY or INSTANCE_LOST if it ends before or after it is ready."""
    parser = Parser(
        prog="mpillm launch-triton-server",
        description="Start a tritonserver of one model repository, and wait until it ends. Ctrl-C ends it.",
        epilog="example:\n  python -m mpillm launch-triton-server --model_repo build/triton_model_repo_0"
        " --world_size 2",
    )
    options = collect(argv, _Options, parser)
    if not options.model_repo:
        raise ConfigError("launch-triton-server needs --model_repo DIR", about=["model_repo"])
    try:
        program = find_tritonserver(options.tritonserver)
    except NotHere as error:
        raise ConfigError(str(error)) from None
    repo = _repository(options)
    ports = Ports(options.http_port, options.grpc_port, options.metrics_port)
    extra = _extra_args(options)
    server = triton_server(0, program, repo, ports, _mpirun(options, repo), extra)
    if options.dry_run:
        print(server.command)
        return ExitCode.DONE
    if not options.force:
        _check_alone()
    return run_servers([server], options.log_dir, options.load_deadline, options.stall_timeout)


def _repository(options: _Options) -> Repository:
    """Return the repository, with its models' ranks by the options. Raises ConfigError."""
    assert options.model_repo is not None
    repo = read_repository(Path(options.model_repo), "--model_repo")
    needed = max(repo.ranks.values())
    if options.multi_model and options.world_size > 1 and not options.disable_spawn_processes:
        raise ConfigError(
            f"--world_size {options.world_size}: with --multi_model the models start their ranks"
        )
    if options.no_mpi and options.world_size > 1:
        raise ConfigError(f"--world_size {options.world_size}: without MPI there is one rank")
    if repo.is_embedded and not options.multi_model and needed != options.world_size:
        raise ConfigError(
            f"--world_size {options.world_size}: the engine in {options.model_repo} has {needed} ranks"
        )
    names = (options.tensorrt_llm_model_name or "").split(",") if options.tensorrt_llm_model_name else []
    if unknown := [name for name in names if name not in repo.ranks]:
        raise ConfigError(
            f"--tensorrt_llm_model_name {','.join(unknown)}: {options.model_repo} has no such model"
        )
    names = names or repo.parallel or ["tensorrt_llm"]
    if options.world_size > 1 and not any(name in repo.ranks for name in names):
        raise ConfigError(
            f"--world_size {options.world_size}: {options.model_repo} has no model with several ranks, or"
            " named tensorrt_llm; name the engine's model with --tensorrt_llm_model_name",
            about=["world_size"],
        )
    several = options.world_size if not options.multi_model else max(2, needed)
    ranks = {name: several if name in names else 1 for name in repo.ranks}
    return repo._replace(ranks=ranks)


def _mpirun(options: _Options, repo: Repository) -> list[str] | None:
    """Return the mpirun arguments; None if the models start their ranks."""
    if options.multi_model:
        return None
    if options.no_mpi or not repo.parallel:
        return []
    if repo.is_embedded:
        return embedded_mpirun(options.world_size, oversubscribe=options.oversubscribe)
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        raise ConfigError("mpirun is not in PATH: it starts the ranks of an engine")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [mpirun, *root, *(["--oversubscribe"] if options.oversubscribe else [])]


def _extra_args(options: _Options) -> ExtraArgs:
    first: list[str] = []
    every: list[str] = []
    if options.log:
        first += ["--log-verbose=3", f"--log-file={options.log_file}"]
    if options.multimodal_gpu0_cuda_mem_pool_bytes:
        first.append(f"--cuda-memory-pool-byte-size=0:{options.multimodal_gpu0_cuda_mem_pool_bytes}")
    if options.multi_model and not options.disable_spawn_processes and (gpus := visible_gpus()):
        # the script's arguments for servers after 24.06
        every += ["--pinned-memory-pool-byte-size=0", "--enable-peer-access=false"]
        every += [f"--cuda-memory-pool-byte-size={i}:0" for i in range(len(gpus))]
    return ExtraArgs(every, first, not options.disable_spawn_processes)


def _check_alone() -> None:
    """Raise ConfigError if this host runs another tritonserver, like the script."""
    running = [
        process.pid for process in psutil.process_iter(["name"]) if process.info["name"] == "tritonserver"
    ]
    if running:
        pids = " ".join(map(str, running))
        raise ConfigError(f"a tritonserver runs already, process {pids}; --force starts another one")
