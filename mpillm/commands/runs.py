"""``python -m mpillm runs``: list runs, newest first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from disagg.errors import ConfigError
from launch.default_paths import RUNS
from mpillm.errors import ExitCode
from mpillm.files import write_text
from mpillm.options import json_output
from mpillm.options.columns import table
from mpillm.options.command_line import Parser
from mpillm.options.field import option
from mpillm.options.parsers import boolean, positive
from mpillm.options.values import Values, collect
from mpillm.report.page.index_page import COLUMNS, cells_of, index_page
from mpillm.report.run_directory import display_path
from mpillm.report.run_list import LATEST, find_runs, find_series

_WIDE = 10_000  # a run remains one line


class _Options(Values, group="runs"):
    """Options of ``runs``."""

    most = option("how many to list; the page has all", positive, default=20)
    series = option("also list the runs of sweeps, searches and other series", boolean, default=False)


def main(argv: Sequence[str]) -> int:
    """Print the list, and the page's path."""
    parser = Parser(
        prog="mpillm runs",
        figures=True,
        usage="python -m mpillm runs [FOLDER] [options]",
        description="List the runs below a folder, newest first, and write an index page of them there."
        f" Commands with a run directory also accept '{LATEST}': the newest run in {RUNS}.",
        epilog="examples:\n  python -m mpillm runs\n  python -m mpillm report latest",
    )
    parser.add_argument(
        "folder", metavar="FOLDER", nargs="?", default=str(RUNS), help=f"where to look [default: {RUNS}]"
    )
    options = collect(argv, _Options, parser)
    folder = Path(parser.parse_args(argv).folder)
    runs = find_runs(folder)
    if not runs:
        raise ConfigError(f"there is no run in {folder}")
    chosen = [one for one in runs if options.series or not one.series] or runs
    listed = chosen[: options.most]
    head, *lines = table([COLUMNS, *map(cells_of, listed)], 2, width=_WIDE).splitlines()
    print(head)
    for one, line in zip(listed, lines, strict=True):
        print(f"{line}\n  {one.title}: {one.path}" if one.title else f"{line}\n  {one.path}")
    if len(chosen) > options.most:
        print(f"… and {len(chosen) - options.most:,} more: --most {len(chosen)}")
    if n_parts := len(runs) - len(chosen):
        print(f"… and {n_parts:,} of sweeps, searches and other series: --series true")
    json_output.set_figures(
        [
            {"run": str(one.path), "started": one.started, "status": one.status, "result": one.result}
            for one in listed
        ]
    )
    page = folder / "index.html"
    write_text(page, index_page(folder.absolute(), runs, find_series(folder)))
    print(f"\npage  {display_path(page.absolute())}")
    return ExitCode.DONE
