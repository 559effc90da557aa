"""Common parts of commands that start several runs: options, ranks, and failures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from disagg.errors import ConfigError
from launch.default_paths import RUNS
from mpillm.cores.number_of_ranks import ranks_of
from mpillm.errors import StageError
from mpillm.files import write_json
from mpillm.options import json_output
from mpillm.options.command_line import Parser, add_fields
from mpillm.options.field import option
from mpillm.options.fields.mpirun_options import MPIRUN_OPTIONS
from mpillm.options.fields.results import OutputFields
from mpillm.options.parsers import positive
from mpillm.options.run_config import RunConfig
from mpillm.options.values import Values, own_values
from mpillm.runtime.whole_runs import EndedRun

GROUP = "runs"


class SeriesOptions(Values):
    """Options of commands that start several runs."""

    mpirun_options = MPIRUN_OPTIONS
    log_dir = OutputFields.log_dir.but(
        f"folder for the runs' directories [default: {RUNS}/TIME-COMMAND]", group=GROUP
    )
    output = OutputFields.output.but("also write the figures to this JSON file", group=GROUP)

    def report(self, figures: Any) -> None:
        """Write the figures to --json and --output."""
        json_output.set_figures(figures)
        if self.output:
            write_json(Path(self.output), figures)


class RankedOptions(SeriesOptions, group=GROUP):
    """Options of commands whose runs have the same number of ranks."""

    n = option("ranks of each run [default: as many as its options require]", positive)


S = TypeVar("S", bound=SeriesOptions)


def parse_series(argv: Sequence[str], options: type[S], parser: Parser) -> tuple[S, list[str]]:
    """Return a command's own options, and the other arguments. Raises ConfigError for a wrong option."""
    own = options.declared()
    add_fields(parser, own)
    values, args = parser.parse_known(argv)
    texts = {name: text for name, text in vars(values).items() if text is not None}
    return options(own_values(own, texts)), args


def mpirun_args(options: RankedOptions, config: RunConfig) -> list[str]:
    """Return the arguments of mpirun for a run with these options."""
    return ["-n", str(options.n or ranks_of(config)), *options.mpirun_options]


def must_have_verdict(ended: EndedRun, name: str) -> EndedRun:
    """Return `ended`. Raises ConfigError if its options are wrong, StageError for other failures."""
    if not ended.failure:
        return ended
    kind = ConfigError if ended.code == 2 else StageError
    raise kind(f"{name} failed: {ended.failure}")
