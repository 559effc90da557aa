"""``python -m mpillm generate-disagg-config``: a disaggregation YAML for `run`, `plan` and `trtllm-serve`.

Alone it writes what the options say. Under `mpirun -n N`, N being the ranks of all instances together, rank 0 writes it with the address
of each instance: the host of its first rank, as `trtllm-serve disaggregated_mpi_worker` cuts the world, and ports from
--worker_start_port on.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import disagg
from disagg import DisaggConfig
from disagg.errors import ConfigError
from launch.environment import launched_size
from mpillm.command_line import Parser
from mpillm.config import RunConfig, parse
from mpillm.errors import ExitCode
from mpillm.fields import MODEL_AND_LIMITS, Field, shown
from mpillm.json_files import write_text
from mpillm.planning import generated
from mpillm.serving import llm_api_options

_OF_TRTLLM = ("server_port", "worker_start_port", "trtllm_checkpoint_flags", "trtllm_runtime_flags", "enable_kv_cache_reuse")
_SHOWN = shown("workload", "topology", also=("dry_run", "world_size", *MODEL_AND_LIMITS, *_OF_TRTLLM))


def main(argv: Sequence[str]) -> int:
    """The command on one rank, or alone."""
    output = Field("output", "the file to write [default: --trtllm_disagg_config_path, else standard output]", group="output")
    parser = Parser(
        prog="mpillm generate-disagg-config",
        description="Write a disaggregation YAML from options. Under mpirun -n N, for the N workers of this mpirun.",
        epilog="examples:\n"
        "  python -m mpillm generate-disagg-config --mode disaggregated --world_size 8 --ctx_tp_size 2 --output disagg.yaml\n"
        "  mpirun -n 4 python -m mpillm generate-disagg-config --benchmarks=llama2-70b --core_type=trtllm_disagg"
        " --trtllm_disagg_config_path=disagg.yaml",
    )
    config = parse(argv, parser, [*_SHOWN, output])
    path = config.output or config.disagg_config
    if launched_size(os.environ) is not None:
        made = _of_this_world(config)
        if made is None:
            return ExitCode.DONE
    else:
        made = dataclasses.replace(generated(config, config.world_size), port=config.server_port)
    text = disagg.dump(_with_flags(config, made))
    if config.dry_run or not path:
        print(text, end="")
        return ExitCode.DONE
    _write(Path(path), text, "--output" if config.output else "--trtllm_disagg_config_path")
    print(f"wrote {path}: {made.n_workers} workers")
    return ExitCode.DONE


def _of_this_world(config: RunConfig) -> DisaggConfig | None:
    """On rank 0 the configuration for the ranks of this mpirun, all of them workers; None on the others."""
    from mpillm.comms.world import start_mpi

    world = start_mpi()
    started = launched_size(os.environ)
    if world.size != started:
        raise ConfigError(f"one of {started} processes, and its MPI sees {world.size}: mpirun is of another MPI than mpi4py")
    hosts = world.gather(socket.gethostname())
    if hosts is None:
        return None
    hosts = ["localhost"] * len(hosts) if len(set(hosts)) == 1 else hosts
    return for_workers(config, hosts)


def on_this_host(config: RunConfig, n_workers: int | None) -> DisaggConfig:
    """The configuration for workers on this host; None: as many as the options make instances for."""
    return for_workers(config, ["localhost"] * (n_workers or generated(config, None).n_workers))


def for_workers(config: RunConfig, hosts: Sequence[str]) -> DisaggConfig:
    """The configuration for workers on these hosts, in rank order, with URLs; ConfigError if the options need another number."""
    # Two control ranks more: `generate` makes one of its workers a control rank where it must to fit, and that must not happen here.
    made = generated(config, len(hosts) + 2)
    if made.mode != "disaggregated":
        raise ConfigError(
            f"--mode {made.mode}: trtllm-serve's workers are disaggregated; name --mode disaggregated or --core_type trtllm_disagg"
        )
    if made.n_workers != len(hosts):
        raise ConfigError(f"mpirun -n {len(hosts)}: the options make instances of {made.n_workers} ranks together; start as many")
    first = 0
    port = config.worker_start_port
    sections: dict[str, Any] = {}
    for name, server in made.sections:
        leaders = [hosts[first + i * server.ranks_per_instance] for i in range(server.num_instances)]
        sections[name] = dataclasses.replace(server, urls=tuple(f"{host}:{port + i}" for i, host in enumerate(leaders)))
        first += server.n_workers
        port += server.num_instances
    made = dataclasses.replace(made, hostname=hosts[0], port=config.server_port, **sections)
    return disagg.parse(disagg.dump(made), "generated configuration")  # checked as a file is: no address twice


def _with_flags(config: RunConfig, made: DisaggConfig) -> DisaggConfig:
    """For TensorRT-LLM, whose servers know of the harness's flags what the file says; `run` gives our own cores theirs."""
    if config.core_type != "trtllm_disagg":
        return made
    options = llm_api_options(config)
    cache = options.pop("kv_cache_config")
    sections: dict[str, Any] = {
        name: dataclasses.replace(server, kv_cache_config=cache, extra={**server.extra, **options}) for name, server in made.sections
    }
    return disagg.parse(disagg.dump(dataclasses.replace(made, **sections)), "generated configuration")


def _write(path: Path, text: str, option: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise ConfigError(f"{option} {path}: can't be written: {error.strerror}") from error
