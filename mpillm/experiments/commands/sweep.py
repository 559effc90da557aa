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
    grid_of_words,
    grid_of_yaml,
    pareto,
    points,
)
from mpillm.experiments.run_series import GROUP, RankedOptions, mpirun_words, parse_series
from mpillm.experiments.sweep_page import COLUMNS, doubtful_points, per, sweep_page
from mpillm.experiments.table import cell, values_text
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
        "a YAML of options, each with a value or a list of values; options that are typed override it"
    )


def main(argv: Sequence[str]) -> int:
    """Run the points that have no result yet; print all; 4 if one failed."""
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
    options, words = parse_series(argv, Options, parser)
    grid = (grid_of_yaml(Path(options.grid)) if options.grid else {}) | grid_of_words(words)
    todo = list(points(grid))
    if len(todo) < 2:
        raise ConfigError("sweep: no option has several values: --max_batch_size 4 8 16, say")
    mpirun = [mpirun_words(options, parse_run(point.words, parser)) for point in todo]
    folder = series_folder(options.log_dir, "sweep").absolute()
    print(f"{len(todo)} points, in {display_path(folder)}", flush=True)
    lasted: list[float] = []  # the runs of now
    found = [
        _point(folder, point, start, i, todo, lasted)
        for i, (point, start) in enumerate(zip(todo, mpirun, strict=True), 1)
    ]
    front = pareto(found)
    fixed = {name: values[0] if values else "" for name, values in grid.items() if len(values) < 2}
    print("\n" + _table(todo, found, front))
    for line in doubtful_points(found):
        print(indented("doubtful: ", line))
    options.tell({"points": found, "pareto": front})
    write_text(folder / "sweep.html", sweep_page(folder, found, front, fixed))
    print(f"\npage  {display_path(folder / 'sweep.html')}")
    return ExitCode.TEST_FAILED if any(one["status"] == "FAILED" for one in found) else ExitCode.DONE


def _point(
    folder: Path, point: Point, mpirun: Sequence[str], i: int, todo: Sequence[Point], lasted: list[float]
) -> dict[str, Any]:
    """Return a point's figures, of the run that is there or of a new one, the `i`-th of `todo`.

    How long a new one took goes to `lasted`.
    """
    head = f"  {i} of {len(todo)}  "
    where = folder / point.folder
    said = {"options": dict(point.values), "run": str(where)}
    label = " ".join(f"{name}={value}" for name, value in point.values.items())
    if (run := finished(where)) is not None:
        print(indented(head, f"{label}: was there"), flush=True)
        return said | figures(run)
    if where.exists():  # keep what a failed or cut run left, for its owner to look at
        where.rename(unused(where.with_name(f"{where.name}.incomplete")))
    began = time.monotonic()
    ended = run_in(where, mpirun, point.words)
    lasted.append(time.monotonic() - began)
    if ended.failure:
        print(indented(head, f"{label}: failed: {ended.failure.splitlines()[0]}"), flush=True)
        return said | {"status": "FAILED", "why": ended.failure}
    verdict = f"{ended.result['status']}{_left(folder, todo[i:], lasted)}"
    print(indented(head, f"{label}: {verdict}"), flush=True)
    return said | figures(RunFiles.read(where))


def _left(folder: Path, others: Sequence[Point], lasted: Sequence[float]) -> str:
    """Return about how long the other points take, for the end of a line: as long as those so far."""
    n = sum(finished(folder / point.folder) is None for point in others)
    return f"  about {duration(n * mean(lasted))} left" if n else ""


def _table(todo: Sequence[Point], found: Sequence[dict[str, Any]], front: Sequence[int]) -> str:
    of = per(found)
    names = list(todo[0].values)
    rows = [[*names, *(text.format(of=of) for text in COLUMNS.values()), "Pareto"]]
    for i, (point, one) in enumerate(zip(todo, found, strict=True)):
        cells = [cell(one.get(key)) for key in COLUMNS]
        rows.append([*point.values.values(), *cells, "*" if i in front else ""])
    lines = [table(rows, len(names) + 1, len(names))]
    if front:
        lines += [
            "",
            *curve(
                found,
                front,
                [f"{values_text(one)}{'  INVALID' * (one['status'] == 'INVALID')}" for one in found],
                of,
            ),
        ]
    return "\n".join(lines)
