"""``python -m mpillm rerun``"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import pairwise

from disagg.errors import ConfigError
from launch.command import wrapped
from launch.default_paths import RUNS
from launch.masking import MASK
from mpillm.commands import mpirun
from mpillm.errors import ExitCode
from mpillm.options.columns import indented
from mpillm.options.command_line import Parser
from mpillm.options.fields.general import GeneralFields
from mpillm.options.fields.mpirun_options import MPIRUN_OPTIONS
from mpillm.options.fields.results import OutputFields
from mpillm.options.values import Values, collect
from mpillm.report.repeat import repeated
from mpillm.report.run_files import RunFiles
from mpillm.report.run_list import run_path

_GROUP = "rerun"


class _Options(Values):
    """Options of ``rerun``."""

    log_dir = OutputFields.log_dir
    mpirun_options = MPIRUN_OPTIONS
    dry_run = GeneralFields.dry_run.but(
        "print the differences and the command, start nothing", default=False, group=_GROUP
    )


def main(argv: Sequence[str]) -> int:
    """Print the differences from the original run, then repeat it. Returns the run's exit code."""
    parser = Parser(
        prog="mpillm rerun",
        usage="python -m mpillm rerun RUN_DIR [options]",
        description="Repeat a run with the same options and number of ranks. First prints the differences"
        " from the original run, such as versions.",
        epilog=f"example:\n  python -m mpillm rerun {RUNS}/first --log_dir {RUNS}/second",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the run directory")
    options = collect(argv, _Options, parser)
    run = RunFiles.read(run_path(parser.parse_args(argv).run_dir))
    argv, notes = repeated(run)
    for note in notes:
        print(indented("  ", note))
    if not notes:
        print("  nothing known is different from when the run was made")
    if not options.dry_run and (name := next((name for name, value in pairwise(argv) if MASK in value), "")):
        raise ConfigError(
            f"{run.path}: {name} has a secret, which no run directory keeps; to repeat the run, fill it in"
            f" for {MASK} in the command that `rerun {run.path} --dry_run` prints"
        )
    argv += ["--log_dir", options.log_dir] if options.log_dir else []
    command = ["-n", str(run.world_size), *options.mpirun_options, "run", *argv]
    print(wrapped(map(shlex.quote, ["python", "-m", "mpillm", "mpirun", *command])), flush=True)
    return ExitCode.DONE if options.dry_run else mpirun.main(command)
