"""``python -m mpillm run-harness``: an mpirun for each workload and scenario named, one after another."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.children import Children
from launch.command import Command
from launch.default_paths import RUNS
from launch.supervisor import MPIRUN_GRACE_S
from mpillm.core_names import TRITON_URL
from mpillm.cores.number_of_ranks import ranks_of
from mpillm.cores.registry import check_core
from mpillm.errors import ExitCode
from mpillm.options.columns import table
from mpillm.options.command_line import Parser
from mpillm.options.fields import AllFields
from mpillm.options.fields.effects import RUN
from mpillm.options.options import RUN_FIELDS, run_name, without
from mpillm.options.run_config import RunConfig
from mpillm.options.unused_options import unused_in_all, unused_option_lines, unused_options
from mpillm.stages.stage_options import parse_each

_CONNECT_S = 2.0
# Options that this command sets for each test.
_SET_OPTIONS = ("benchmarks", "models", "scenarios", "world_size", "dry_run", "log_dir")


def _spawns_triton(config: RunConfig) -> bool:
    """Return whether tests through Triton must start their servers."""
    elsewhere = config.triton_skip_server_spawn or config.triton_server_urls or config.triton_grpc_ports
    if config.harness_type != "triton" or config.server or elsewhere:
        return False
    host, _, port = TRITON_URL.partition(":")
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except OSError:
        return True
    return False


def parse(argv: Sequence[str]) -> list[RunConfig]:
    """Return the configuration of each test. Raises ConfigError."""
    parser = Parser(
        prog="mpillm run-harness",
        description="Run a test for each workload and scenario named, each in its own mpirun. Accepts all"
        " options of run.",
        epilog="examples:\n"
        "  python -m mpillm run-harness --benchmarks=llama2,moe --scenarios=Offline,Server"
        " --model_scale=tiny\n"
        "  python -m mpillm run-harness --core_type dummy --scenarios=Offline,Server --server_target_qps 100"
        " --world_size 4",
    )
    configs = parse_each(argv, parser, [*RUN_FIELDS, AllFields.world_size, AllFields.dry_run])
    return [config.with_yaml() for config in configs]


def main(argv: Sequence[str]) -> int:
    """Run the tests; return their highest exit code."""
    configs = parse(argv)
    if _spawns_triton(configs[0]):
        argv = [*argv, "--server=tritonserver"]
        print(f"  each test starts its tritonservers, as none listens at {TRITON_URL}", flush=True)
        configs = parse(argv)
    unused_option_lines(unused_in_all(configs, RUN))  # lines are printed by each run
    for config in configs:
        check_core(config)
    tests = [test_of(config, argv, len(configs) > 1) for config in configs]
    if configs[0].dry_run:
        for test in tests:
            print(test.command)
        return ExitCode.DONE
    return run_in_turn(tests)


@dataclass(frozen=True)
class Test:
    """A test to run: its name, its mpirun, and its run directory."""

    name: str
    command: Command
    log_dir: Path


def run_in_turn(tests: Sequence[Test]) -> int:
    """Run the tests and print a table of their results; return the highest of their exit codes."""
    lines = []
    worst = 0
    for test in tests:
        print(f"\n=== {test.name}\n{test.command}", flush=True)
        earlier = _written(test)
        # No deadline here: the mpirun has one for its start, and rank 0 one for each phase and for a test
        # without answers.
        with Children(MPIRUN_GRACE_S, pass_on=True) as children:
            child = children.start(test.name, test.command.argv, test.command.environment())
            code = children.wait(child, None) or 0
        code = 128 - code if code < 0 else code
        worst = max(worst, code)
        lines.append((test.name, *_outcome(test, code, earlier)))
    print("\n" + _table(lines))
    return worst


def test_of(config: RunConfig, argv: Sequence[str], several: bool) -> Test:
    """Return the mpirun of one test: the options on the command line, with this workload and scenario.

    Options that only other tests of the command use are omitted.
    """
    name = run_name(config)
    of_other_tests = [one.name for one in unused_options(config, RUN) if one.is_error]
    log_dir = Path(config.log_dir or RUNS / time.strftime("%Y%m%d-%H%M%S"))
    if several or not config.log_dir:
        log_dir = log_dir / name if config.log_dir else log_dir.with_name(f"{log_dir.name}-{name}")
    args = [
        *without(argv, (*_SET_OPTIONS, *of_other_tests)),
        f"--scenarios={config.scenario}",
        *([f"--benchmarks={config.benchmark_name}"] if config.benchmark else []),
    ]
    start = [sys.executable, "-m", "mpillm", "mpirun", "-n", str(ranks_of(config))]
    return Test(name, Command((*start, "run", *args, f"--log_dir={log_dir}")), log_dir)


def _written(test: Test) -> int | None:
    """Return the time of the test's result.json; None if there is none."""
    try:
        return (test.log_dir / "result.json").stat().st_mtime_ns
    except OSError:
        return None


def _outcome(test: Test, code: int, earlier: int | None) -> tuple[str, str, str]:
    """Return the status, samples per second and exit code for the table, from the test's result.json.

    `earlier`: time of the file before the test; an unchanged file is not a result.
    """
    if _written(test) == earlier:
        return "no result", "", str(code)
    try:
        result: dict[str, Any] = json.loads((test.log_dir / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "no result", "", str(code)
    rate = result.get("samples_per_second")
    doubtful = " DOUBTFUL" if result.get("doubts") else ""
    return (
        f"{result.get('status', 'no result')}{doubtful}",
        f"{rate:.2f}" if isinstance(rate, (int, float)) else "",
        str(code),
    )


def _table(lines: Sequence[tuple[str, ...]]) -> str:
    return table([("test", "status", "samples/s", "exit code"), *lines], left=4)
