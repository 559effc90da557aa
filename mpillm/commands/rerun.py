"""``python -m mpillm rerun``"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from disagg.errors import ConfigError
from launch import mpirun
from mpillm.config.values import Values, collect
from mpillm.configurator import Field
from mpillm.configurator.command_line import Parser
from mpillm.configurator.parsers import boolean
from mpillm.errors import ExitCode
from mpillm.fields.results import OutputFields
from mpillm.files import read_object
from mpillm.report.repeat import options_again
from mpillm.report.run_environment import ENVIRONMENT, describe_environment, differences
from mpillm.report.run_files import RunFiles

_GROUP = "rerun"


class _Options(Values):
    """Options of ``rerun``."""

    log_dir = OutputFields.log_dir
    mpirun = Field("mpirun", 'options of mpirun, as one word: "--host a:4,b:4"', default="", group=_GROUP)
    dry_run = Field(
        "dry_run", "say what differs, print the command, start nothing", boolean, default=False, group=_GROUP
    )


def main(argv: Sequence[str]) -> int:
    """Say what is different from when the run was made, then repeat it. Returns the run's exit code."""
    parser = Parser(
        prog="mpillm rerun",
        usage="python -m mpillm rerun RUN_DIR [options]",
        description="Repeat a run: the same options on as many ranks. What is different here is said first.",
        epilog="example:\n  python -m mpillm rerun build/runs/first --log_dir build/runs/second",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the run directory")
    options = collect(argv, _Options, parser)
    run = RunFiles.read(Path(parser.parse_args(argv).run_dir))
    words, notes = again(run)
    for note in notes:
        print(f"  {note}")
    if not notes:
        print("  nothing known is different from when the run was made")
    words += ["--log_dir", options.log_dir] if options.log_dir else []
    command = [*shlex.split(options.mpirun), "run", *words]
    print(f"python -m mpillm mpirun -n {ranks_of(run)} {shlex.join(command)}", flush=True)
    return ExitCode.DONE if options.dry_run else mpirun.main(["-n", str(ranks_of(run)), *command])


def again(run: RunFiles) -> tuple[list[str], list[str]]:
    """Return the options of `run` that repeat a run, and what is different here.

    Raises ConfigError if that can't be known.
    """
    words, notes = options_again(run.path)
    if (run.path / ENVIRONMENT).exists():
        notes = [*differences(read_object(run.path / ENVIRONMENT), describe_environment()), *notes]
    else:
        notes.insert(0, f"no {ENVIRONMENT}: nothing is known of the software that it ran with")
    nodes = {rank.get("node") for rank in run.plan_ranks}
    if len(nodes) > 1:
        notes.append(
            f"it ran on {len(nodes)} nodes ({', '.join(sorted(map(str, nodes)))}): name as many with --mpirun"
        )
    return words, notes


def ranks_of(run: RunFiles) -> int:
    """Return on how many ranks a run was. Raises ConfigError if it does not say so."""
    ranks = run.result.get("world_size", run.plan.get("world_size"))
    if not isinstance(ranks, int):
        raise ConfigError(f"{run.path}: neither result.json nor plan.json says how many ranks it had")
    return ranks
