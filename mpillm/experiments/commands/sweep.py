"""``python -m mpillm sweep``: a grid of options, one table, and a Pareto curve."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from disagg.errors import ConfigError
from launch.default_paths import RUNS
from mpillm.errors import ExitCode
from mpillm.experiments.option_grid import (
    Point,
    curve,
    figures,
    finished,
    grid_of_args,
    grid_of_yaml,
    grid_points,
    pareto,
)
from mpillm.experiments.run_series import GROUP, RankedOptions, mpirun_args, parse_series
from mpillm.experiments.sweep_page import columns, doubtful_points, per, sweep_page
from mpillm.experiments.table import cell, values_text
from mpillm.experiments.warm_cache import RepeatedPrompts
from mpillm.files import write_text
from mpillm.options.columns import indented, table
from mpillm.options.command_line import Parser
from mpillm.options.field import option
from mpillm.options.options import parse_run
from mpillm.report.numbers import duration
from mpillm.report.run_directory import display_path, series_folder, unused
from mpillm.report.run_files import RunFiles
from mpillm.runtime.whole_runs import run_in


class Options(RankedOptions, group=GROUP):
    """Options of ``sweep``."""

    grid = option(
        "a YAML of options, each with a value or a list of values; command-line options override it"
    )


def main(argv: Sequence[str]) -> int:
    """Run the points that have no result yet; print all. Return TEST_FAILED if one fails."""
    parser = Parser(
        prog="mpillm sweep",
        figures=True,
        description="Run every combination of values: an option of run with several values is varied."
        " With --log_dir, points that already have a result there are not run again, so an interrupted sweep"
        " goes on where it stopped; points that failed or are half written are run again.",
        epilog="examples:\n"
        f"  python -m mpillm sweep -n 3 --core_type dummy --max_batch_size 4 8 16 --log_dir {RUNS}/sweep\n"
        "  python -m mpillm sweep --grid grid.yaml --output sweep.json",
    )
    options, args = parse_series(argv, Options, parser)
    grid = (grid_of_yaml(Path(options.grid)) if options.grid else {}) | grid_of_args(args)
    todo = list(grid_points(grid))
    if len(todo) < 2:
        raise ConfigError("sweep: no option has several values; example: --max_batch_size 4 8 16")
    configs = [parse_run(point.args, parser) for point in todo]
    mpirun = [mpirun_args(options, config) for config in configs]
    folder = series_folder(options.log_dir, "sweep").absolute()
    print(f"{len(todo)} points, in {display_path(folder)}", flush=True)
    lasted: list[float] = []  # seconds of this command's runs
    repeated = RepeatedPrompts()
    points = []
    for i, (point, start, config) in enumerate(zip(todo, mpirun, configs, strict=True), 1):
        points.append(one := _point(folder, point, start, i, todo, lasted))
        result = None if one["status"] == "FAILED" else RunFiles.read(Path(one["run"])).result
        if text := repeated.warning(config, result):
            print(indented("  warning: ", text), flush=True)
    front = pareto(points)
    fixed = {name: values[0] if values else "" for name, values in grid.items() if len(values) < 2}
    print("\n" + _table(todo, points, front))
    for line in doubtful_points(points):
        print(indented("doubtful: ", line))
    options.report({"points": points, "pareto": front})
    write_text(folder / "sweep.html", sweep_page(folder, points, front, fixed, repeated.text))
    print(f"\npage  {display_path(folder / 'sweep.html')}")
    return ExitCode.TEST_FAILED if any(one["status"] == "FAILED" for one in points) else ExitCode.DONE


def _point(
    folder: Path, point: Point, mpirun: Sequence[str], i: int, todo: Sequence[Point], lasted: list[float]
) -> dict[str, Any]:
    """Return the figures of the `i`-th point of `todo`, from an existing or a new run.

    `lasted`: gets the duration of a new run.
    """
    head = f"  {i} of {len(todo)}  "
    where = point.directory(folder)
    row = {"options": dict(point.values), "run": str(where)}
    label = " ".join(f"{name}={value}" for name, value in point.values.items())
    if (run := finished(where)) is not None:
        print(indented(head, f"{label}: was there"), flush=True)
        return row | figures(run)
    if where.exists():  # keep the files of a failed or incomplete run
        where.rename(unused(where.with_name(f"{where.name}.incomplete")))
    began = time.monotonic()
    ended = run_in(where, mpirun, point.args)
    lasted.append(time.monotonic() - began)
    if ended.failure:
        print(indented(head, f"{label}: failed: {ended.failure.splitlines()[0]}"), flush=True)
        return row | {"status": "FAILED", "why": ended.failure}
    verdict = f"{ended.result['status']}{_left(folder, todo[i:], lasted)}"
    print(indented(head, f"{label}: {verdict}"), flush=True)
    return row | figures(RunFiles.read(where))


def _left(folder: Path, others: Sequence[Point], lasted: Sequence[float]) -> str:
    """Return the estimated remaining time, from the runs so far, as the end of a line."""
    n = sum(finished(point.directory(folder)) is None for point in others)
    return f"  about {duration(n * mean(lasted))} left" if n else ""


def _table(todo: Sequence[Point], points: Sequence[dict[str, Any]], front: Sequence[int]) -> str:
    of = per(points)
    names = list(todo[0].values)
    titles = columns(points)
    rows = [[*names, *(text.format(of=of) for text in titles.values()), "Pareto"]]
    for i, (point, one) in enumerate(zip(todo, points, strict=True)):
        cells = [cell(one.get(key)) for key in titles]
        rows.append([*point.values.values(), *cells, "*" if i in front else ""])
    lines = [table(rows, len(names) + 1, len(names))]
    if front:
        lines += [
            "",
            *curve(
                points,
                front,
                [f"{values_text(one)}{'  INVALID' * (one['status'] == 'INVALID')}" for one in points],
                of,
            ),
        ]
    return "\n".join(lines)
