"""``python -m mpillm compare A B …``: runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError
from mpillm.configurator.command_line import Parser
from mpillm.errors import ExitCode
from mpillm.experiments.compared_runs import ComparedRun, compare
from mpillm.experiments.intervals import BLOCKS, LEAST_PER_BLOCK
from mpillm.experiments.table import table
from mpillm.files import write_json


def main(argv: Sequence[str]) -> int:
    """Print the comparison. Raises ConfigError for a directory that can't be compared."""
    parser = Parser(
        prog="mpillm compare",
        usage="python -m mpillm compare DIR DIR … [options]",
        description="Compare runs: first the options that differ, then each figure with its 95 % confidence"
        f" interval, from {BLOCKS} blocks of each run's requests. The change is against the first run. How"
        " much two runs of the same options differ, the blocks of one run can't tell: `ab` measures that.",
        epilog="example:\n  python -m mpillm compare build/runs/first build/runs/second",
    )
    parser.add_argument("directories", nargs="*", metavar="DIR", help="run directories, two or more")
    parser.add_argument("--output", metavar="FILE", help="write the comparison to this JSON file, too")
    options = parser.parse_args(argv)
    if len(options.directories) < 2:
        raise ConfigError("compare: expected two or more run directories")
    runs = [ComparedRun.read(Path(name)) for name in options.directories]
    if len(scenarios := {run.scenario for run in runs}) > 1:
        raise ConfigError(f"compare: runs of different scenarios ({', '.join(sorted(scenarios))})")
    result = compare(runs)
    _print(result)
    if options.output:
        write_json(Path(options.output), result)
    return ExitCode.DONE


def _print(result: dict[str, Any]) -> None:
    names = [chr(ord("A") + i) if i < 26 else f"run {i + 1}" for i in range(len(result["runs"]))]
    for name, run in zip(names, result["runs"], strict=True):
        counted = f"{run['samples']:,} samples, {run['errors']} errors"
        print(f"{name}  {run['directory']}: {run['scenario']}, {run['status']}, {counted}")
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
        row = [f"{one['figure']} {one['unit']}".rstrip(), _value(first)]
        for other in others:
            row += [_value(other), _change(other)]
        rows.append(row)
    print(table(rows))
    if any(cell and cell["half_width"] is None for one in result["figures"] for cell in one["runs"]):
        print(f"without ±: fewer than {BLOCKS * LEAST_PER_BLOCK} requests, or all in too short a time")


def _text(value: Any) -> str:
    return "-" if value is None else str(value)


def _value(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "-"
    width = cell["half_width"]
    return f"{cell['value']:,.4g}" + (f" ± {width:,.2g}" if width is not None else "")


def _change(cell: dict[str, Any] | None) -> str:
    if cell is None or "change" not in cell:
        return "-"
    width = cell["change_half_width"]
    if width is None:
        return f"{100 * cell['change']:+.1f} %"
    return f"{100 * cell['change']:+.1f} ± {100 * width:.1f} %{' *' if cell['differs'] else '  '}"
