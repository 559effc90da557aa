"""``python -m mpillm run-harness``: an mpirun for each workload and scenario named, one after another."""

from __future__ import annotations

from collections.abc import Sequence

from mpillm import fields
from mpillm.config.idle import idle_in_all, told
from mpillm.config.options import RUN_FIELDS, parse_each
from mpillm.configurator.command_line import Parser
from mpillm.cores.registry import check_core
from mpillm.errors import ExitCode
from mpillm.fields.effects import RUN
from mpillm.runtime.in_turn import run_in_turn, test_of


def main(argv: Sequence[str]) -> int:
    """Run the tests; return their highest exit code."""
    parser = Parser(
        prog="mpillm run-harness",
        description="Run a test for each workload and scenario named, each in an mpirun of its own. Takes all"
        " options of run.",
        epilog="examples:\n"
        "  python -m mpillm run-harness --benchmarks=llama2,moe --scenarios=Offline,Server"
        " --model_scale=tiny\n"
        "  python -m mpillm run-harness --core_type dummy --scenarios=Offline,Server --server_target_qps 100"
        " --world_size 4",
    )
    configs = parse_each(argv, parser, [*RUN_FIELDS, fields.world_size, fields.dry_run])
    configs = [config.with_yaml() for config in configs]
    told(idle_in_all(configs, RUN))  # lines are printed by each run
    for config in configs:
        check_core(config)
    tests = [test_of(config, argv, len(configs) > 1) for config in configs]
    if configs[0].dry_run:
        for test in tests:
            print(test.command)
        return ExitCode.DONE
    return run_in_turn(tests)
