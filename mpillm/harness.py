"""``python -m mpillm run-harness``: one test after another, an mpirun for each workload and scenario named."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import disagg
from disagg.generator import control_ranks
from launch.children import Children
from launch.supervisor import KILL_GRACE_S, STOP_GRACE_S
from mpillm import fields
from mpillm.builder.operation import Command
from mpillm.command_line import Parser
from mpillm.config import RUN_FIELDS, RunConfig, parse_each
from mpillm.devices import visible_gpus
from mpillm.errors import ExitCode
from mpillm.planning import generated

_OURS = ("benchmarks", "models", "scenarios", "world_size", "dry_run", "log_dir")  # options that are said anew for each test


@dataclass(frozen=True)
class Test:
    """A test to run: its name, its mpirun, and its run directory."""

    name: str
    command: Command
    log_dir: Path


def main(argv: Sequence[str]) -> int:
    """The command: the worst exit code of its tests."""
    parser = Parser(
        prog="mpillm run-harness",
        description="Run a test for each workload and scenario named, each in an mpirun of its own. Takes all options of run.",
        epilog="examples:\n"
        "  python -m mpillm run-harness --benchmarks=llama2,moe --scenarios=Offline,Server --model_scale=tiny\n"
        "  python -m mpillm run-harness --core_type dummy --scenarios=Offline,Server --server_target_qps 100 --world_size 4",
    )
    configs = parse_each(argv, parser, [*RUN_FIELDS, fields.world_size, fields.dry_run])
    tests = [test_of(config, argv, len(configs) > 1) for config in configs]
    if configs[0].dry_run:
        for test in tests:
            print(test.command)
        return ExitCode.DONE
    lines = []
    worst = 0
    for test in tests:
        print(f"\n=== {test.name}\n{test.command}", flush=True)
        earlier = _written(test)
        # No deadline here: the mpirun has one for its start, and rank 0 those of each phase, and of a test without an answer.
        # An mpirun of ours ends its ranks itself when it is told to stop, and takes this long for it at most.
        with Children(stop_grace_s=STOP_GRACE_S + 2 * KILL_GRACE_S) as children:
            code = children.wait(children.start(test.name, test.command.argv, test.command.environment()), None) or 0
        code = 128 - code if code < 0 else code
        worst = max(worst, code)
        lines.append((test.name, *_outcome(test, code, earlier)))
    print("\n" + _table(lines))
    return worst


def test_of(config: RunConfig, argv: Sequence[str], several: bool) -> Test:
    """The mpirun of one test: the options as they were typed, and this workload and scenario."""
    name = "-".join(part for part in (config.benchmark, config.scenario) if part)
    log_dir = Path(config.log_dir or Path("build/runs") / time.strftime("%Y%m%d-%H%M%S"))
    if several or not config.log_dir:
        log_dir = log_dir / name if config.log_dir else log_dir.with_name(f"{log_dir.name}-{name}")
    words = [*_without_ours(argv), f"--scenarios={config.scenario}", *([f"--benchmarks={config.benchmark}"] if config.benchmark else [])]
    start = [sys.executable, "-m", "mpillm", "mpirun", "-n", str(ranks_of(config))]
    return Test(name, Command((*start, "run", *words, f"--log_dir={log_dir}")), log_dir)


def ranks_of(config: RunConfig) -> int:
    """--world_size, or the ranks of the instances that the options or the YAML name, with control ranks.

    An aggregated test has as many instances as this node's GPUs hold, one where they are not known.
    """
    if config.world_size:
        return int(config.world_size)
    if config.disagg_config and Path(config.disagg_config).is_file():
        workers = disagg.load(config.disagg_config).n_workers
    else:
        workers = generated(config, None).n_workers
        if config.mode == "aggregated":
            workers *= max(1, len(visible_gpus() or ()) // workers)
    control = next(n for n in (1, 2) if control_ranks(workers + n) == n)
    return int(workers + control)


def _without_ours(argv: Sequence[str]) -> list[str]:
    """The options as typed, but for those that this command says for each test."""
    kept: list[str] = []
    ours = False  # whether the option is that a word belongs to: its name, or its value
    for word in argv:
        if word.startswith("--"):
            ours = word[2:].partition("=")[0].replace("-", "_") in _OURS
        if not ours:
            kept.append(word)
    return kept


def _written(test: Test) -> int | None:
    """When the test's result.json was written; None if it is not there."""
    try:
        return (test.log_dir / "result.json").stat().st_mtime_ns
    except OSError:
        return None


def _outcome(test: Test, code: int, earlier: int | None) -> tuple[str, str, str]:
    """Status, samples per second and exit code for the table, from the test's result.json, unless it is that of an `earlier` run."""
    if _written(test) == earlier:
        return "no result", "", str(code)
    try:
        result: dict[str, Any] = json.loads((test.log_dir / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "no result", "", str(code)
    rate = result.get("samples_per_second")
    return str(result.get("status", "no result")), f"{rate:.2f}" if isinstance(rate, (int, float)) else "", str(code)


def _table(lines: Sequence[tuple[str, ...]]) -> str:
    rows = [("test", "status", "samples/s", "exit code"), *lines]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
