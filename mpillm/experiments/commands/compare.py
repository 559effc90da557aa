"""``python -m mpillm compare A B …``: compare runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError
from launch.default_paths import RUNS
from mpillm.errors import ExitCode
from mpillm.experiments.compare_page import compare_page, headline
from mpillm.experiments.compared_runs import ComparedRun, compare
from mpillm.experiments.intervals import BLOCKS, STARRED, WITHOUT_INTERVAL
from mpillm.experiments.table import change_text, run_names, value_text
from mpillm.files import write_json, write_text
from mpillm.options import json_output
from mpillm.options.columns import indented, table
from mpillm.options.command_line import Parser
from mpillm.report.run_directory import display_path, series_folder
from mpillm.report.run_list import run_path


def main(argv: Sequence[str]) -> int:
    """Print the comparison. Raises ConfigError for a directory that cannot be compared."""
    parser = Parser(
        prog="mpillm compare",
        figures=True,
        usage="python -m mpillm compare DIR DIR … [options]",
        description="Compare runs: first the options that differ, then each figure with its 95 % confidence"
        f" interval, from {BLOCKS} blocks of each run's requests. Changes are relative to the first run."
        " Single runs cannot show how much runs with equal options differ; `ab` measures that.",
        epilog=f"example:\n  python -m mpillm compare {RUNS}/first {RUNS}/second",
    )
    parser.add_argument("directories", nargs="*", metavar="DIR", help="run directories, two or more")
    parser.add_argument(
        "--log_dir", metavar="DIR", help=f"folder for the page [default: {RUNS}/TIME-compare]"
    )
    parser.add_argument("--output", metavar="FILE", help="also write the comparison to this JSON file")
    options = parser.parse_args(argv)
    if len(options.directories) < 2:
        raise ConfigError("compare: expected two or more run directories")
    runs = [ComparedRun.read(run_path(name)) for name in options.directories]
    if len(scenarios := {run.scenario for run in runs}) > 1:
        raise ConfigError(f"compare: runs of different scenarios ({', '.join(sorted(scenarios))})")
    result = compare(runs)
    _print(result)
    json_output.set_figures(result)
    if options.output:
        write_json(Path(options.output), result)
    page = series_folder(options.log_dir, "compare") / "compare.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    write_text(page, compare_page(result, runs, page.parent))
    print(f"\npage  {display_path(page)}")
    return ExitCode.DONE


def _print(result: dict[str, Any]) -> None:
    names = run_names(len(result["runs"]))
    for name, run in zip(names, result["runs"], strict=True):
        counted = f"{run['samples']:,} samples, {run['errors']} errors"
        print(indented(f"{name}  ", f"{run['directory']}: {run['scenario']}, {run['status']}, {counted}"))
        for line in (*(f"doubtful: {one}" for one in run["doubts"]), *run["environment"]):
            print(indented("   ", line))
    print()
    if result["options"]:
        rows = [["options", *names]]
        rows += [[one["option"], *map(_text, one["values"])] for one in result["options"]]
        print(table(rows, len(rows[0])))
    else:
        print("options  all alike")
    print()
    rows = [["figure", names[0], *(cell for name in names[1:] for cell in (name, "change"))]]
    for one in result["figures"]:
        first, *others = one["runs"]
        row = [f"{one['figure']} {one['unit']}".rstrip(), value_text(first)]
        for other in others:
            row += [value_text(other), change_text(other)]
        rows.append(row)
    print(table(rows))
    print("\n" + indented("", headline(result, names)))
    if any(cell and cell.get("differs") for one in result["figures"] for cell in one["runs"]):
        print(indented("* ", STARRED))
    if any(cell and cell["half_width"] is None for one in result["figures"] for cell in one["runs"]):
        print(f"without ±: {WITHOUT_INTERVAL}")


def _text(value: Any) -> str:
    return "-" if value is None else str(value)
