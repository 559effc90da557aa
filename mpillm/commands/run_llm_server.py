"""``python -m mpillm run-llm-server``: start the servers that a core talks to, and stay until they end or the user ends them.

`triton_grpc` and `--harness_type=triton`: a `tritonserver` for each model repository. `trtllm_endpoint`: a `trtllm-serve` for each URL.
`trtllm_disagg`: the workers and the leader of a disaggregation YAML, or one of the two: MLPERF_DISAGG_LAUNCH_TYPE says which.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import yaml

from disagg import DisaggConfig
from disagg.errors import ConfigError
from launch import trtllm_serve
from launch.check_world import check_world
from launch.command import NotHere, find_program
from launch.environment import LAUNCH_TYPE, drop_launch_type, launch_type
from launch.launcher import EveryRankError, one_of_several
from launch.servers import Server, ServerFailed, Servers, check_ports, files_of, ports_here, write_files
from launch.tritonserver import Repository, default_grpc_ports, find_tritonserver, ports_beside, read_repositories, triton_server
from mpillm.builder.preconditions import check_gpus
from mpillm.builder.served import check_agreement, llm_api_options, on_this_host, served
from mpillm.builder.triton_repository import triton_stages
from mpillm.builder.trtllm import TRTLLMLibraryLoader
from mpillm.comms.start import mpi_library
from mpillm.config.backends import TritonHarnessConfig, TrtllmEndpointConfig
from mpillm.config.options import RunConfig, parse
from mpillm.configurator.command_line import Parser
from mpillm.core_names import BUILT_IN, NOT_BUILT
from mpillm.cores.registry import BackendRegistry, function
from mpillm.devices import visible_gpus
from mpillm.errors import ExitCode
from mpillm.fields import MODEL_AND_LIMITS, shown
from mpillm.files import as_writable

_ALSO = ("dry_run", "trtllm_server_urls", "llm_gen_config_path", "enable_kv_cache_reuse", "log_dir", "load_deadline", "stall_timeout")
_SHOWN = shown("workload", "topology", "checkpoint", "build", "triton", "server", also=(*_ALSO, *MODEL_AND_LIMITS))
_EXTRA_OPTIONS = Path("build/servers/extra_llm_api_options.yaml")


def main(argv: Sequence[str]) -> int:
    """The command; its exit code: NOT_READY or INSTANCE_LOST when a server ends by itself before or after it was ready."""
    parser = Parser(
        prog="mpillm run-llm-server",
        description="Start the servers that a core needs, and stay until they end. Ctrl-C ends them.",
        epilog="examples:\n"
        "  python -m mpillm run-llm-server --harness_type=triton --triton_model_repo build/triton_model_repo\n"
        "  python -m mpillm run-llm-server --core_type=trtllm_endpoint --model_path DIR --tensor_parallelism 2\n"
        "  python -m mpillm run-llm-server --core_type=trtllm_disagg --trtllm_disagg_config_path=disagg.yaml",
    )
    config = parse(argv, parser, _SHOWN)
    if config.core_type == "trtllm_disagg":
        if launch_type() == "worker" and one_of_several():
            check_world(mpi_library(), None, ["run-llm-server", *argv], variables={LAUNCH_TYPE: "worker"})
    else:
        drop_launch_type(f"--core_type {config.core_type}")
    kind = BackendRegistry.declared(config.core_type).servers
    if kind is None:
        able = [name for name in (*BUILT_IN, *NOT_BUILT) if BackendRegistry.declared(name).servers]
        raise ConfigError(f"--core_type {config.core_type} needs no server; these cores do: {', '.join(able)}")
    with config.autoapply():
        servers: list[Server] = function(kind)(config)
    if config.dry_run:
        for path, text in files_of(servers).items():
            print(f"mkdir -p {path.parent} && cat > {path} <<'END'\n{text}END")
        for server in servers:
            print(server.command)
        return ExitCode.DONE
    check_ports(servers)
    folder = Path(config.log_dir) if config.log_dir else Path("build/servers") / time.strftime("%Y%m%d-%H%M%S")
    with as_writable(folder):
        write_files(folder, servers)
    try:
        with Servers(folder) as running:
            for server in servers:
                print(f"  {server.name}: log {running.start(server)}", flush=True)
            seconds = running.wait_ready(config.load_deadline)
            if urls := [url for server in servers for url in server.urls]:
                print(f"  ready after {seconds:.1f} s: {','.join(urls)}", flush=True)
            print(f"  {running.watch(config.stall_timeout)} has ended")
    except ServerFailed as error:
        print(f"mpillm: {error}", file=sys.stderr)
        return ExitCode.INSTANCE_LOST if error.was_ready else ExitCode.NOT_READY
    return ExitCode.DONE


def _lacking(config: RunConfig, problem: NotHere) -> None:
    """Raise `problem`; in a dry run only report it."""
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


def triton_servers(config: RunConfig) -> list[Server]:
    """A `tritonserver` for each model repository."""
    if config.triton_skip_server_spawn:
        raise ConfigError("--triton_skip_server_spawn: the servers run already, so there is nothing to start")
    repos = _repositories(config)
    try:
        program = find_tritonserver(config.tritonserver)
    except NotHere as error:
        _lacking(config, error)
        program = config.tritonserver or "tritonserver"
    needs_mpirun = any(repo.needs_mpirun for repo in repos)
    mpirun = _program(config, "mpirun", "it starts the ranks of an engine") if needs_mpirun else ""
    ports = ports_beside(_grpc_ports(config, len(repos)))
    return [triton_server(index, program, repo, ports[index], mpirun) for index, repo in enumerate(repos)]


def _repositories(config: RunConfig) -> list[Repository]:
    """Those that are there; in a dry run that finds none, those that generate-triton-config would write."""
    repos = read_repositories(config.triton_model_repo)
    if not repos:
        folder = f"{config.triton_model_repo}_0"
        problem = f"--triton_model_repo {config.triton_model_repo}: there is no {folder}; generate-triton-config makes it"
        _lacking(config, NotHere(problem))
        stages = triton_stages(config)
        print(f"# assumed: {', '.join(str(stage.output) for stage in stages)}, as generate-triton-config writes them")
        return [Repository(stage.output, stage.names, stage.layout.gpus_per_model) for stage in stages]
    if config.triton_num_servers not in (None, len(repos)):
        raise ConfigError(
            f"--triton_num_servers {config.triton_num_servers}, but there are {len(repos)} model repositories, {repos[0].folder} …"
        )
    return repos


def _grpc_ports(config: RunConfig, n: int) -> list[int]:
    """The gRPC port of each server of this host: as given, or the default ones."""
    urls = config.build(TritonHarnessConfig).server_urls
    if not urls:
        return default_grpc_ports(n)
    source = "--triton_grpc_ports" if config.triton_grpc_ports else "--triton_server_urls"
    given = [*ports_here(urls).values()]
    if len(given) != n:
        raise ConfigError(
            f"{source} names {len(given)} servers on this host ({socket.gethostname()}), and there are {n} model repositories"
        )
    return given


# --- trtllm-serve ---


def endpoint_servers(config: RunConfig) -> list[Server]:
    """A `trtllm-serve` for each URL on this host, each with its share of the GPUs."""
    harness = config.build(TrtllmEndpointConfig)
    what = served(config)
    if what.is_made and not Path(what.model).is_dir():
        _lacking(config, NotHere(f"{what.said}: there is no folder {what.model}; generate-engines makes it"))
    cut = TRTLLMLibraryLoader(
        tp_size=config.tensor_parallelism,
        pp_size=config.pipeline_parallelism,
        ep_size=config.moe_expert_parallelism,
        build_flags=config.trtllm_build_flags,
    ).layout
    gpus = visible_gpus()
    if config.trtllm_server_urls:
        ports = [*ports_here(config.trtllm_server_urls).values()]
        if not ports:
            raise ConfigError(f"--trtllm_server_urls {','.join(config.trtllm_server_urls)}: none is on this host ({socket.gethostname()})")
    else:
        ports = [trtllm_serve.FIRST_PORT + index for index in range(max(1, len(gpus or ()) // cut.ranks))]
    try:
        check_gpus(len(ports) * cut.ranks, f"{len(ports)} trtllm-serve of {cut.ranks} GPUs each")
    except NotHere as error:
        _lacking(config, error)
    flags = {**harness.build_flags, **harness.runtime_flags}
    sizes = {"tp_size": cut.tp_size, "pp_size": cut.pp_size, "ep_size": cut.ep_size if cut.ep_size > 1 else None}
    limits = {name: flags.get(name) for name in ("max_batch_size", "max_num_tokens", "max_beam_width", "num_postprocess_workers")}
    return trtllm_serve.endpoints(
        _program(config, "trtllm-serve", trtllm_serve.INSTALL),
        [what.model, *(["--tokenizer", str(what.tokenizer)] if what.tokenizer else [])],
        ports,
        {"backend": what.backend, **sizes, **limits, "max_seq_len": config.max_seq_len or flags.get("max_seq_len")},
        (_EXTRA_OPTIONS, yaml.safe_dump(llm_api_options(config), sort_keys=False)),
        cut.ranks,
        None if gpus is None else len(gpus),
    )


# --- disaggregated serving ---


def disaggregated_servers(config: RunConfig) -> list[Server]:
    """Workers, leader or both.

    A worker is a rank of the mpirun around this process if there is one; else an mpirun of all workers is started here.
    """
    path = config.disagg_config
    if not path:
        raise ConfigError("--core_type trtllm_disagg needs --trtllm_disagg_config_path; generate-disagg-config writes that file")
    kind, launcher = launch_type(), one_of_several()
    made = _yaml(config, path, launcher.size if launcher and kind == "worker" else None)
    if made.mode != "disaggregated":
        raise ConfigError(f"{path}: {made.mode}; trtllm-serve needs context_servers and generation_servers")
    serve = _program(config, "trtllm-serve", trtllm_serve.INSTALL)
    if launcher and kind == "worker":
        return [trtllm_serve.worker_rank(serve, path, made, launcher)]
    if launcher:
        what = "one leader is started alone, or by mpirun -n 1" if kind else f"{LAUNCH_TYPE}=worker makes each a worker"
        raise EveryRankError(f"{launcher.name} started {launcher.size or 'several'} ranks of run-llm-server: {what}")
    servers = [] if kind == "leader" else [trtllm_serve.workers(serve, path, made)]
    if kind != "worker":
        servers.append(trtllm_serve.leader(serve, path, made, config.load_deadline, config.stall_timeout))
    return servers


def _yaml(config: RunConfig, path: str, size: int | None) -> DisaggConfig:
    """The YAML that is named; in a dry run that finds none, what generate-disagg-config would write for workers on this host."""
    if Path(path).exists():
        config = config.with_yaml()
        assert config.yaml is not None
        check_agreement(config, path, config.yaml)
        return config.yaml
    _lacking(config, NotHere(f"--trtllm_disagg_config_path {path}: no such file; generate-disagg-config writes it"))
    made = on_this_host(config, size)
    print(f"# assumed: {path}, as generate-disagg-config writes it for {made.n_workers} workers on this host")
    return made
