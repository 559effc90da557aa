"""What is started for each kind of server: `tritonserver`, `trtllm-serve`, and the two halves of disaggregated serving."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

import disagg
from disagg.errors import ConfigError, nearest
from launch.environment import launched_size
from mpillm.builder.commands import triton_stages
from mpillm.builder.operation import Command
from mpillm.builder.preconditions import NotHere, check_gpus, find_program
from mpillm.builder.trtllm import TRTLLMLibraryLoader
from mpillm.comms.world import launcher_rank
from mpillm.config import RunConfig
from mpillm.devices import visible_gpus
from mpillm.fields.flags import CHUNKING_POLICIES, SCHEDULER_POLICIES
from mpillm.harness_config import TritonHarnessConfig, TrtllmEndpointConfig

LAUNCH_TYPE = "MLPERF_DISAGG_LAUNCH_TYPE"
_TRITONSERVER = "/opt/tritonserver/bin/tritonserver"  # in NVIDIA's containers
_FIRST_ENDPOINT_PORT = 30000  # the reference harness's
_INSTALL = "install TensorRT-LLM, as in NVIDIA's containers"


@dataclass(frozen=True)
class Server:
    """A server to start. `ports` are those that it opens on this host, by what they are for."""

    name: str
    command: Command
    ports: dict[str, int]
    health: tuple[str, ...]  # URLs that answer 200 when the server is ready; none: there is nothing to ask
    urls: tuple[str, ...] = ()  # where it is reached
    files: Mapping[Path, str] = field(default_factory=dict)  # what it reads, to be written before it is started
    keeps_job: bool = False  # it is a rank of the mpirun that started this process, and needs what that set


def this_host(host: str) -> bool:
    """Whether a host's name is this one's."""
    return host in ("localhost", "127.0.0.1", "0.0.0.0", socket.gethostname(), socket.getfqdn(), os.environ.get("HOSTNAME"))


def _ports_here(urls: Iterable[str]) -> dict[str, int]:
    """The ports of those of the addresses ``host:port`` that are on this host."""
    return {url: int(url.rpartition(":")[2]) for url in urls if this_host(url.rpartition(":")[0])}


def _lacking(config: RunConfig, problem: NotHere) -> None:
    """What is needed is not here: an error, but for a dry run, which says so and goes on."""
    if not config.dry_run:
        raise problem
    print(f"# can't run here: {problem}")


def _program(config: RunConfig, name: str, hint: str) -> str:
    try:
        return find_program(name, hint)
    except NotHere as error:
        _lacking(config, error)
        return name


# --- Triton ---


class _Repository(NamedTuple):
    """A server's model repository, its models, and how many GPUs, or ranks, the largest of them takes."""

    folder: Path
    models: list[str]
    ranks: int


def triton(config: RunConfig) -> list[Server]:
    """A `tritonserver` for each model repository, as launch_triton_server.py starts it: under mpirun if an engine has several ranks."""
    if config.triton_skip_server_spawn:
        raise ConfigError("--triton_skip_server_spawn: the servers run already, so there is nothing to start")
    repos = _repositories(config)
    program = config.tritonserver or shutil.which("tritonserver") or (_TRITONSERVER if Path(_TRITONSERVER).is_file() else "")
    if not program or not shutil.which(program):
        _lacking(config, NotHere(f"--tritonserver {program or '(not given)'}: no such program, in PATH or as {_TRITONSERVER}"))
        program = program or "tritonserver"
    grpc = _grpc_ports(config, len(repos))
    others = (port for port in range(8000, 65536) if port not in grpc)
    servers = []
    for index, repo in enumerate(repos):
        if grpc[index] == 8001 + 3 * index:  # Triton's own neighbours: 8000, 8001, 8002
            ports = {"HTTP": 8000 + 3 * index, "gRPC": 8001 + 3 * index, "metrics": 8002 + 3 * index}
        else:
            ports = {"HTTP": next(others), "gRPC": grpc[index], "metrics": next(others)}
        command = _triton_command(config, str(Path(program)), repo, ports, index)
        health, url = f"http://localhost:{ports['HTTP']}/v2/health/ready", f"localhost:{ports['gRPC']}"
        servers.append(Server(f"tritonserver {index}", command, ports, (health,), (url,)))
    return servers


def _repositories(config: RunConfig) -> list[_Repository]:
    """Those that are there; in a dry run that finds none, those that generate-triton-config would write."""
    repos: list[_Repository] = []
    while (folder := Path(f"{config.triton_model_repo}_{len(repos)}")).is_dir():
        files = sorted(folder.glob("*/config.pbtxt"))
        if not files:
            raise ConfigError(f"--triton_model_repo: {folder} has no model in it (a folder with a config.pbtxt)")
        repos.append(_Repository(folder, [file.parent.name for file in files], max(map(_gpus_of, files))))
    if not repos:
        problem = f"--triton_model_repo {config.triton_model_repo}: there is no {folder}; generate-triton-config makes it"
        _lacking(config, NotHere(problem))
        stages = triton_stages(config)
        print(f"# assumed: {', '.join(str(stage.output) for stage in stages)}, as generate-triton-config writes them")
        return [_Repository(stage.output, stage.names, stage.layout.gpus_per_model) for stage in stages]
    if config.given("triton_num_servers") and config.triton_num_servers != len(repos):
        raise ConfigError(
            f"--triton_num_servers {config.triton_num_servers}, but there are {len(repos)} model repositories, {repos[0].folder} …"
        )
    return repos


def _gpus_of(file: Path) -> int:
    """The GPUs of a model, which are its engine's ranks; 1 if it does not say."""
    match = re.search(r'"gpu_device_ids"\s*value:?\s*\{\s*string_value:\s*"([^"]*)"', file.read_text(encoding="utf-8"))
    return len(match[1].split(",")) if match else 1


def _grpc_ports(config: RunConfig, n: int) -> list[int]:
    """The gRPC port of each server of this host: as given, or 8001, 8004, …"""
    urls = config.build(TritonHarnessConfig).server_urls
    if not urls:
        return [8001 + 3 * index for index in range(n)]
    source = "--triton_grpc_ports" if config.triton_grpc_ports else "--triton_server_urls"
    given = [*_ports_here(urls).values()]
    if len(given) != n:
        raise ConfigError(
            f"{source} names {len(given)} servers on this host ({socket.gethostname()}), and there are {n} model repositories"
        )
    return given


def _triton_command(config: RunConfig, program: str, repo: _Repository, ports: Mapping[str, int], server: int) -> Command:
    def rank_line(rank: int) -> list[str]:
        line = [program, f"--model-repository={repo.folder}", f"--grpc-port={ports['gRPC']}", f"--http-port={ports['HTTP']}"]
        line.append(f"--metrics-port={ports['metrics']}")
        if rank > 0:  # these ranks only compute
            line += ["--model-control-mode=explicit", *(f"--load-model={model}" for model in repo.models)]
        return [*line, "--disable-auto-complete-config", f"--backend-config=python,shm-region-prefix-name=prefix{server}_{rank}_"]

    if repo.ranks == 1:
        return Command(tuple(rank_line(0)))
    if len(repo.models) > 1:
        # TensorRT-LLM's backend then starts the ranks of each model by itself.
        return Command(tuple(rank_line(0)), {"TRTLLM_ORCHESTRATOR": "1", "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": "1"})
    words = [_program(config, "mpirun", "it starts the ranks of an engine"), *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    for rank in range(repo.ranks):
        words += [*([":"] if rank else []), "-n", "1", *rank_line(rank)]
    return Command(tuple(words))


# --- trtllm-serve ---


def endpoints(config: RunConfig) -> list[Server]:
    """A `trtllm-serve` for each URL on this host, each with its share of the GPUs."""
    harness = config.build(TrtllmEndpointConfig)
    backend = {"cpp": "tensorrt", "pytorch": "pytorch"}[harness.backend_type]
    model = _model(config, backend)
    cut = TRTLLMLibraryLoader(
        tp_size=config.tensor_parallelism,
        pp_size=config.pipeline_parallelism,
        ep_size=config.moe_expert_parallelism,
        build_flags=config.trtllm_build_flags,
    ).layout
    gpus = visible_gpus()
    if config.trtllm_server_urls:
        ports = [*_ports_here(config.trtllm_server_urls).values()]
        if not ports:
            raise ConfigError(f"--trtllm_server_urls {','.join(config.trtllm_server_urls)}: none is on this host ({socket.gethostname()})")
    else:
        ports = [_FIRST_ENDPOINT_PORT + index for index in range(max(1, len(gpus or ()) // cut.ranks))]
    try:
        check_gpus(len(ports) * cut.ranks, f"{len(ports)} trtllm-serve of {cut.ranks} GPUs each")
    except NotHere as error:
        _lacking(config, error)
    flags = {**harness.build_flags, **harness.runtime_flags}
    options = {"tp_size": cut.tp_size, "pp_size": cut.pp_size, "ep_size": cut.ep_size if cut.ep_size > 1 else None}
    options |= {name: flags.get(name) for name in ("max_batch_size", "max_num_tokens", "max_beam_width", "num_postprocess_workers")}
    options["max_seq_len"] = config.max_seq_len or flags.get("max_seq_len")
    extra = Path("build/servers/extra_llm_api_options.yaml")
    text = yaml.safe_dump(llm_api_options(config), sort_keys=False)
    program = _program(config, "trtllm-serve", _INSTALL)
    servers = []
    for index, port in enumerate(ports):
        words = [program, "serve", *model, "--host", "0.0.0.0", "--port", str(port), "--backend", backend]
        words += [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
        words += ["--extra_llm_api_options", str(extra)]
        env = {}
        if gpus is not None and len(ports) > 1:
            ours = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(gpus))))).split(",")
            env["CUDA_VISIBLE_DEVICES"] = ",".join(ours[index * cut.ranks : (index + 1) * cut.ranks])
        command, url = Command(tuple(words), env), f"localhost:{port}"
        servers.append(Server(f"trtllm-serve {index}", command, {"HTTP": port}, (_health(url),), (url,), {extra: text}))
    return servers


def _model(config: RunConfig, backend: str) -> list[str]:
    """What trtllm-serve reads: the engine, whose tokenizer is the model's; else the quantised checkpoint, or the model as published."""
    if backend == "tensorrt" and config.engine_dir:
        return [str(config.engine_dir), *(["--tokenizer", str(config.model_path)] if config.model_path else [])]
    if config.llm_quantizer_outdir and Path(config.llm_quantizer_outdir).is_dir():
        return [str(config.llm_quantizer_outdir)]
    if not config.model_path:
        raise ConfigError(
            f"--core_type {config.core_type} needs --model_path, or the --llm_quantizer_outdir that generate-engines has made"
        )
    return [str(config.model_path)]


def llm_api_options(config: RunConfig) -> dict[str, Any]:
    """TensorRT-LLM's LLM arguments, as a YAML holds them, from the harness's flags."""
    flags = config.trtllm_runtime_flags  # with the defaults of those that are options, and checked
    cache: dict[str, Any] = {"free_gpu_memory_fraction": flags["kvcache_free_gpu_mem_frac"]}
    cache["enable_block_reuse"] = bool(flags.get("enable_kv_cache_reuse", config.enable_kv_cache_reuse))
    if dtype := config.trtllm_checkpoint_flags.get("kv_cache_dtype"):
        cache["dtype"] = dtype
    return {
        "kv_cache_config": cache,
        "scheduler_config": {
            "capacity_scheduler_policy": SCHEDULER_POLICIES[flags["batch_scheduler_policy"]],
            "context_chunking_policy": CHUNKING_POLICIES[flags["context_chunking_policy"]],
        },
        "enable_chunked_prefill": flags["enable_chunked_context"],
    }


# --- disaggregated serving ---


def disaggregated(config: RunConfig) -> list[Server]:
    """Workers, leader or both.

    A worker is a rank of the mpirun around this process if there is one; else an mpirun of all workers is started here.
    """
    if not config.disagg_config:
        raise ConfigError("--core_type trtllm_disagg needs --trtllm_disagg_config_path; generate-disagg-config writes that file")
    kind, size = os.environ.get(LAUNCH_TYPE), launched_size(os.environ)
    if kind not in (None, "worker", "leader"):
        raise ConfigError(f"environment variable {LAUNCH_TYPE} {kind}: not worker or leader{nearest(kind, ('worker', 'leader'))}")
    made = _yaml(config, size if kind == "worker" else None)
    if made.mode != "disaggregated":
        raise ConfigError(f"{config.disagg_config}: {made.mode}; trtllm-serve needs context_servers and generation_servers")
    serve = _program(config, "trtllm-serve", _INSTALL)
    if kind == "worker" and size is not None:
        return [_worker_rank(config, made, serve, size)]
    if kind is None and size is not None:
        raise ConfigError(f"under mpirun, the environment variable {LAUNCH_TYPE} has to say worker or leader")
    servers = []
    if kind != "leader":
        servers.append(_workers(config, made, serve))
    if kind != "worker":
        seconds = str(int(config.load_deadline))
        words = (serve, "disaggregated", "-c", str(config.disagg_config), "-t", seconds, "-r", str(int(config.stall_timeout)))
        url = f"{made.hostname}:{made.port}"
        servers.append(Server("disaggregated leader", Command(words), {"HTTP": made.port}, (_health(url),), (url,)))
    return servers


def _yaml(config: RunConfig, size: int | None) -> disagg.DisaggConfig:
    """The YAML that is named; in a dry run that finds none, what generate-disagg-config would write for workers on this host."""
    if Path(config.disagg_config).exists():
        return disagg.load(config.disagg_config)
    problem = f"--trtllm_disagg_config_path {config.disagg_config}: no such file; generate-disagg-config writes it"
    _lacking(config, NotHere(problem))
    from mpillm.builder.disagg_config import on_this_host  # which needs `llm_api_options`

    made = on_this_host(config, size)
    print(f"# assumed: {config.disagg_config}, as generate-disagg-config writes it for {made.n_workers} workers on this host")
    return made


def _health(url: str) -> str:
    return f"http://{url}/health"


def _worker_words(config: RunConfig, serve: str) -> tuple[str, ...]:
    return (serve, "disaggregated_mpi_worker", "-c", str(config.disagg_config))


def _urls(made: disagg.DisaggConfig, path: str) -> list[tuple[int, str]]:
    """First rank and URL of each instance, in the file's order."""
    found, first = [], 0
    for name, server in made.sections:
        if not server.urls:
            raise ConfigError(f"{path}: {name} has no urls, which trtllm-serve needs")
        for url in server.urls:
            found.append((first, url))
            first += server.ranks_per_instance
    return found


def _worker_rank(config: RunConfig, made: disagg.DisaggConfig, serve: str, size: int) -> Server:
    if size != made.n_workers:
        raise ConfigError(f"{config.disagg_config} has {made.n_workers} workers, and this mpirun has {size} ranks; they must be as many")
    rank = int(launcher_rank())
    mine = tuple(url for first, url in _urls(made, config.disagg_config) if first == rank)
    ports = {f"HTTP {url}": int(url.rpartition(":")[2]) for url in mine}
    return Server(f"worker {rank}", Command(_worker_words(config, serve)), ports, tuple(map(_health, mine)), mine, keeps_job=True)


def _workers(config: RunConfig, made: disagg.DisaggConfig, serve: str) -> Server:
    from launch.mpirun import command_line, detect, usable_cores

    line = command_line(detect(), made.n_workers, _worker_words(config, serve), root=os.geteuid() == 0, cores=usable_cores(), survive=False)
    urls = tuple(url for _, url in _urls(made, config.disagg_config))
    ports = {f"HTTP {url}": port for url, port in _ports_here(urls).items()}
    return Server("workers", Command(tuple(line)), ports, tuple(map(_health, urls)))
