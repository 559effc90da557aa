"""``python -m mpillm generate-disagg-config``: a disaggregation YAML for `run`, `plan` and `trtllm-serve`.

Without mpirun, it writes the values of the options. Under `mpirun -n N`, N being the ranks of all instances,
rank 0 adds the address of each instance: the host of its first rank, in the order of `trtllm-serve
disaggregated_mpi_worker`, and a port from --worker_start_port on.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import disagg
from disagg import DisaggConfig
from disagg.errors import ConfigError
from launch.launcher import EveryRankError, one_of_several
from mpillm.comms.start import start_mpi
from mpillm.core_names import load_object
from mpillm.cores.registry import BackendRegistry
from mpillm.errors import ExitCode
from mpillm.files import write_text
from mpillm.options.command_line import Parser
from mpillm.options.disagg_values import CORE
from mpillm.options.disagg_yaml import generated, with_core_values
from mpillm.options.fields import DEADLINES, command_fields
from mpillm.options.fields.results import OutputFields
from mpillm.options.run_config import RunConfig
from mpillm.stages.disagg_workers import for_workers
from mpillm.stages.stage_options import parse_stage

_ALSO = ("dry_run", "world_size", "server_port", "worker_start_port", "model_path", "llm_gen_config_path")
_FIELDS = command_fields(
    "workload", "topology", "checkpoint", "build", also=(*_ALSO, *(place.field.name for place in CORE))
)


def main(argv: Sequence[str]) -> int:
    """Run the command on one rank, or without mpirun."""
    output = OutputFields.output.but(
        "the file to write [default: --trtllm_disagg_config_path, else standard output]", group="output"
    )
    parser = Parser(
        prog="mpillm generate-disagg-config",
        description="Write a disaggregation YAML from options. Under mpirun -n N, for the N workers of"
        " this mpirun.",
        epilog="examples:\n"
        "  python -m mpillm generate-disagg-config --mode disaggregated --world_size 8 --ctx_tp_size 2"
        " --output disagg.yaml\n"
        "  mpirun -n 4 python -m mpillm generate-disagg-config --benchmarks=llama2-70b"
        " --core_type=trtllm_disagg"
        " --trtllm_disagg_config_path=disagg.yaml",
    )
    try:
        config = parse_stage(argv, parser, [*_FIELDS, output])
    except ConfigError as error:
        raise EveryRankError(str(error)) from None
    path = config[output] or config.disagg_config
    if one_of_several():
        yaml = _of_this_world(config, argv)
        if yaml is None:
            return ExitCode.DONE
    else:
        yaml = generated(config, config.world_size)
    yaml = with_core_values(config, yaml)
    if (for_servers := BackendRegistry.declared(config.core_type).disagg_yaml) is not None:
        yaml = load_object(for_servers)(config, yaml)
    text = disagg.dump(yaml)
    if config.dry_run or not path:
        print(text, end="")
        return ExitCode.DONE
    _write(Path(path), text, "--output" if config[output] else "--trtllm_disagg_config_path")
    print(f"wrote {path}: {yaml.n_workers} workers")
    return ExitCode.DONE


def _of_this_world(config: RunConfig, argv: Sequence[str]) -> DisaggConfig | None:
    """Return on rank 0 the configuration for this mpirun's ranks, all workers; None on the other ranks."""
    world = start_mpi(["generate-disagg-config", *argv], DEADLINES["join"])
    hosts = world.gather(socket.gethostname())
    if hosts is None:
        return None
    hosts = ["localhost"] * len(hosts) if len(set(hosts)) == 1 else hosts
    return for_workers(config, hosts)


def _write(path: Path, text: str, option: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise ConfigError(f"{option} {path}: can't be written: {error.strerror}") from error
