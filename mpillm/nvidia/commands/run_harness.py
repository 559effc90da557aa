"""``python -m mpillm run-harness``: an mpirun for each workload and scenario named, one after another."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from mpillm import fields
from mpillm.config.idle import idle_in_all, told
from mpillm.config.options import RUN_FIELDS, parse_each
from mpillm.config.run_config import RunConfig
from mpillm.configurator.command_line import Parser
from mpillm.core_names import TRITON_URL
from mpillm.cores.registry import check_core
from mpillm.errors import ExitCode
from mpillm.fields.effects import RUN
from mpillm.nvidia.commands.tests_in_turn import run_in_turn, test_of

_CONNECT_S = 2.0


def _spawns_triton(config: RunConfig) -> bool:
    """Return whether tests through Triton have to start their servers: nobody has, or says that he has."""
    elsewhere = config.triton_skip_server_spawn or config.triton_server_urls or config.triton_grpc_ports
    if config.harness_type != "triton" or config.server or elsewhere:
        return False
    host, _, port = TRITON_URL.partition(":")
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except OSError:
        return True
    return False


def _parser() -> Parser:
    return Parser(
        prog="mpillm run-harness",
        description="Run a test for each workload and scenario named, each in an mpirun of its own. Takes all"
        " options of run.",
        epilog="examples:\n"
        "  python -m mpillm run-harness --benchmarks=llama2,moe --scenarios=Offline,Server"
        " --model_scale=tiny\n"
        "  python -m mpillm run-harness --core_type dummy --scenarios=Offline,Server --server_target_qps 100"
        " --world_size 4",
    )


def parse(argv: Sequence[str]) -> list[RunConfig]:
    """Return the configuration of each test. Raises ConfigError."""
    configs = parse_each(argv, _parser(), [*RUN_FIELDS, fields.world_size, fields.dry_run])
    return [config.with_yaml() for config in configs]


def main(argv: Sequence[str]) -> int:
    """Run the tests; return their highest exit code."""
    configs = parse(argv)
    if _spawns_triton(configs[0]):
        argv = [*argv, "--server=tritonserver"]
        print(f"  each test starts its tritonservers, as none listens at {TRITON_URL}", flush=True)
        configs = parse(argv)
    told(idle_in_all(configs, RUN))  # lines are printed by each run
    for config in configs:
        check_core(config)
    tests = [test_of(config, argv, len(configs) > 1) for config in configs]
    if configs[0].dry_run:
        for test in tests:
            print(test.command)
        return ExitCode.DONE
    return run_in_turn(tests)
