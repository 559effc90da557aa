"""A grid of options with a run at each point; a sweep can resume."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError
from disagg.text_file import read_text
from disagg.yaml_text import value_of
from mpillm.experiments.conversation_runs import conversation_values
from mpillm.options.columns import indented
from mpillm.options.fields import BY_NAME
from mpillm.report.numbers import rate_text
from mpillm.report.run_directory import HAS_FIGURES, MEASURED
from mpillm.report.run_files import RunFiles

Grid = dict[str, list[str]]

PER_USER = "tokens_per_second_per_user"
_BAR = 20  # columns of the curve's bars


def grid_of_args(args: Sequence[str]) -> Grid:
    """Return the values of each option as typed, by name. An option with several values is varied.

    Raises ConfigError for an argument before the first option, or a repeated option.
    """
    grid: Grid = {}
    name = ""
    for arg in args:
        if arg.startswith("--"):
            name, equals, value = arg[2:].partition("=")
            name = name.replace("-", "_")
            if name in grid:
                raise ConfigError(f"sweep: --{name} is named twice: put its values behind one --{name}")
            grid[name] = [value] if equals else []
        elif not name:
            raise ConfigError(f"sweep: {arg}: expected options of run, each with one value or several")
        else:
            grid[name].append(arg)
    return {name: _joined(name, values) for name, values in grid.items()}


def _joined(name: str, args: list[str]) -> list[str]:
    """Return the values of an option. Several arguments may be one value: ``--goodput ttft:500 tpot:50``."""
    field = BY_NAME.get(name)
    if len(args) > 1 and field is not None and (field.argparse_opts or {}).get("nargs") == "+":
        with contextlib.suppress(ConfigError):
            field.check(" ".join(args), name)
            return [" ".join(args)]
    return args


def grid_of_yaml(path: Path) -> Grid:
    """Return the grid of a YAML file: options, each with a value or a list of values. Raises ConfigError."""
    read = value_of(read_text(str(path), "--grid "), f"--grid {path}")
    if not isinstance(read, dict) or not read:
        raise ConfigError(f"--grid {path}: expected options, each with a value or a list of values")
    return {
        str(name).replace("-", "_"): [
            _text(one) for one in (values if isinstance(values, list) else [values])
        ]
        for name, values in read.items()
    }


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return ",".join(f"{key}:{_text(one)}" for key, one in value.items())
    return str(value)


@dataclass(frozen=True)
class Point:
    """A point of the grid, which is a run."""

    values: Mapping[str, str]  # of the varied options
    args: tuple[str, ...]  # all arguments of ``run``

    @property
    def folder(self) -> str:
        """Name of a new run directory: the varied options, and the digest of all arguments."""
        values = ",".join(f"{name}={value}" for name, value in self.values.items())
        plain = "".join(c if c.isalnum() or c in "=,._-" else "_" for c in values)[:80]
        return f"{plain or 'run'}-{self._digest}"

    @property
    def _digest(self) -> str:
        return hashlib.sha256(json.dumps(self.args).encode()).hexdigest()[:8]

    def directory(self, sweep: Path) -> Path:
        """Return the run directory in a sweep's folder: with a result if any grid had this point."""
        new = sweep / self.folder
        others = sorted(sweep.glob(f"*-{self._digest}"))
        return next((one for one in (new, *others) if finished(one) is not None), new)


def grid_points(grid: Grid) -> Iterator[Point]:
    """Yield every combination; the last option varies fastest."""
    varied = [name for name, values in grid.items() if len(values) > 1]
    for combination in itertools.product(*(grid[name] or [""] for name in grid)):
        values = dict(zip(grid, combination, strict=True))
        args = (f"--{name}={value}" if value else f"--{name}" for name, value in values.items())
        yield Point({name: values[name] for name in varied}, tuple(args))


def finished(folder: Path) -> RunFiles | None:
    """Return a run with a result; None if it does not exist, is incomplete or damaged, or failed."""
    try:
        run = RunFiles.read(folder)
        status = run.result.get("status")
        judged = status in HAS_FIGURES and "loadgen_result" in run.result and run.detail
        known = figures(run) if judged or status == MEASURED else {}
    except (ConfigError, ArithmeticError, AttributeError, LookupError, TypeError):
        return None
    numbers = (value for name, value in known.items() if name not in ("status", "of", "doubts"))
    damaged = any(value is not None and not isinstance(value, (int, float)) for value in numbers)
    return run if known and not damaged else None


def figures(run: RunFiles) -> dict[str, Any]:
    """Return a point's figures: per GPU (or per worker rank without GPUs), and per user.

    Tokens per second per user: 1 / (mean time per output token of the requests).
    """
    result = run.result
    n, of = run.computing()
    tpot, ttft = result.get("tpot_ms") or {}, result.get("ttft_ms") or {}
    rates = result
    if (window := result.get("conversations") or {}).get("requests_per_second") is not None:
        rates = {**window, "samples_per_second": window["requests_per_second"]}  # without ramp-up and drain
    per = rates["tokens_per_second"] / n if n else None
    return {
        "status": result["status"],
        "samples_per_second": rates["samples_per_second"],
        "tokens_per_second": rates["tokens_per_second"],
        "tokens_per_second_per_gpu": per,
        "of": of,
        "tokens_per_second_per_user": 1000 / tpot["mean"] if tpot.get("mean") else None,
        "ttft_p99_ms": ttft.get("p99"),
        "tpot_p99_ms": tpot.get("p99"),
        **conversation_values(result),
        "doubts": list(result.get("doubts") or []),
    }


def pareto(points: Sequence[Mapping[str, Any]], per_user: str = PER_USER) -> list[int]:
    """Return the Pareto-optimal points in tokens/s per GPU and in `per_user`, by increasing `per_user`."""
    known = [
        (one[per_user], one["tokens_per_second_per_gpu"], i)
        for i, one in enumerate(points)
        if one.get(per_user) and one.get("tokens_per_second_per_gpu")
    ]
    front: list[int] = []
    best = 0.0
    for _, per_gpu, i in sorted(known, key=lambda one: (-one[0], -one[1])):
        if per_gpu > best:
            best = per_gpu
            front.append(i)
    return front[::-1]


def curve(
    points: Sequence[Mapping[str, Any]], front: Sequence[int], labels: Sequence[str], of: str
) -> list[str]:
    """Return the Pareto curve as lines to print; `of`: "GPU" or "rank"."""
    highest = max(points[i]["tokens_per_second_per_gpu"] for i in front)
    lines = [f"Pareto curve: tokens/s per {of} against tokens/s per user"]
    for i in front:
        per_user, per_gpu = (points[i][f"tokens_per_second_per_{one}"] for one in ("user", "gpu"))
        bar = "#" * max(1, round(_BAR * per_gpu / highest))
        head = f"{rate_text(per_user):>10} per user  {bar:<{_BAR}} {rate_text(per_gpu):>8}  "
        lines.append(indented(head, labels[i]))
    return lines
