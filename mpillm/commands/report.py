"""``python -m mpillm report``"""

from __future__ import annotations

from collections.abc import Sequence

from launch.default_paths import RUNS
from mpillm.errors import ExitCode
from mpillm.options import json_output
from mpillm.options.command_line import Parser
from mpillm.options.fields.results import OutputFields
from mpillm.options.values import Values, collect
from mpillm.report.page.page import write_page
from mpillm.report.run_directory import display_path
from mpillm.report.run_files import RunFiles
from mpillm.report.run_list import run_path


class _Options(Values):
    """Options of ``report``."""

    price_per_gpu_hour = OutputFields.price_per_gpu_hour


def main(argv: Sequence[str]) -> int:
    """Write the pages, and print their paths."""
    parser = Parser(
        prog="mpillm report",
        figures=True,
        usage="python -m mpillm report RUN_DIR [RUN_DIR …] [options]",
        description="Write report.html and trace.json of runs again. Failed, killed and damaged runs also get"
        " a page, which lists the missing parts.",
        epilog="examples:\n"
        f"  python -m mpillm report {RUNS}/*\n"
        f"  python -m mpillm report {RUNS}/accuracy --price_per_gpu_hour 2.5",
    )
    parser.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", help="a run directory")
    options = collect(argv, _Options, parser)
    folders = [run_path(folder) for folder in parser.parse_args(argv).run_dirs]
    for folder in folders:
        print(display_path(write_page(folder, options.price_per_gpu_hour).absolute()))
    figures = [{"run": str(folder), "result": RunFiles.read(folder).result} for folder in folders]
    json_output.set_figures(figures)
    return ExitCode.DONE
