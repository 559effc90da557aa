"""Points of MLPerf Endpoints that MLCommons' client measures."""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from disagg.errors import ConfigError
from launch.command import Command
from launch.owned_server import OwnedServer
from mpillm.errors import StageError
from mpillm.files import read_object
from mpillm.programs.load_clients.inference_endpoint import CONFIG_LEFT, SUMMARY_LEFT
from mpillm.programs.load_clients.kind import LoadReport, LoadSpec
from mpillm.programs.load_clients.kinds import kind_of
from mpillm.report.run_directory import display_path
from mpillm.roles.client_program import command_of
from mpillm.submission.client_form import CLIENT, CONFIG, SUMMARY
from mpillm.submission.steady_state import MIN_ALL, SuperPasses, find_steady_state

_NS = 1e9
_TRIES = 3
_MARGIN = 1.3  # factor on the number of requests that the rate so far requires
_MAX_POINT_S = 86400.0
_GRACE_S = 5.0
_POLL_S = 0.5


class ClientPoint(NamedTuple):
    """Measurement of a point by MLCommons' client."""

    summary: dict[str, Any]
    passes: SuperPasses | None  # None: the client left no times of requests


def measured_point(load: LoadSpec, folder: Path, min_s: float, max_s: float, rate: float) -> ClientPoint:
    """Measure a point with `load`, and copy the client's summary and configuration to `folder`.

    The client accepts a number of requests and no duration. A point without a steady state is measured again
    with more passes over the data set if that can help.

    Args:
        load: `load.order` is one pass over the data set.
        min_s: Issue time of the steady state.
        max_s: Time after which no further pass begins.
        rate: Estimated requests per second.

    Raises: ConfigError if the client is not installed, StageError if it fails.
    """
    size = len(load.order)
    n = _n_passes(_MARGIN * min_s * rate / size, max_s * rate / size)
    for tries_left in reversed(range(_TRIES)):
        if load.folder.exists():  # has the report of an earlier try
            shutil.rmtree(load.folder)
        report = run_client(replace(load, order=range(n * size)), load.folder.with_suffix(".log"))
        summary = read_object(load.folder / SUMMARY_LEFT)
        passes = client_passes(report, size)
        seconds = (summary["duration_ns"] or 0) / _NS
        is_fixed = load.concurrency is not None  # Offline has no steady state
        state = find_steady_state(passes.complete(), size, min_s) if passes and is_fixed else None
        covered = state.duration_s if state and state.passes else seconds
        is_steady = seconds >= min_s if state is None else state.is_official
        more = _n_passes(_MARGIN * n * min_s / max(covered, 1e-3), max_s * n / max(seconds, 1e-3))
        if is_steady or (seconds >= min_s and (more <= n or not tries_left)):
            shutil.copyfile(load.folder / SUMMARY_LEFT, folder / SUMMARY)
            shutil.copyfile(load.folder / CONFIG_LEFT, folder / CONFIG)
            return ClientPoint(summary, passes)
        n = max(more, n + 1)
    raise StageError(f"{n:,} passes over the data set would still take less than {min_s:g} s")


def _n_passes(needed: float, allowed: float) -> int:
    """Return the passes of a test: enough for a steady state if the time allows; at least one."""
    return max(1, min(max(MIN_ALL, math.ceil(needed) + 1), math.floor(allowed) + 1))


def client_passes(report: LoadReport, size: int) -> SuperPasses | None:
    """Return the super-passes of a client's test; None: it left no times of requests."""
    if not report.requests:
        return None
    passes = SuperPasses(size)
    for i, record in enumerate(sorted(report.requests, key=lambda one: one.issued)):
        if record.error:
            passes.of(i).add_failure(record.issued)
        else:
            passes.of(i).add(record.issued, record.ttft, record.tpot, record.tokens)
    return passes


def run_client(load: LoadSpec, log: Path) -> LoadReport:
    """Run MLCommons' client and return its report.

    Raises: ConfigError if the client is not installed, StageError if it fails.
    """
    kind = kind_of(CLIENT)
    command = command_of(kind, load)
    load.folder.mkdir(parents=True, exist_ok=True)
    kind.write(load)
    run_program(command, log, _MAX_POINT_S)
    try:
        report = kind.report(load)
    except ConfigError as error:
        raise StageError(f"{kind.title}: {error}") from error
    if problems := [*report.problems, *_count_problems(report.completed, report.failed, load.order)]:
        raise StageError(f"{kind.title}: {'; '.join(problems)}; see {display_path(log)}")
    return report


def run_program(command: Command, log: Path, max_s: float) -> None:
    """Run a command of MLCommons' client until its end. Raises StageError if it fails."""
    kind = kind_of(CLIENT)
    ended = threading.Event()
    program = OwnedServer(command, log, ended.set, _GRACE_S, outlives_s=_GRACE_S)
    until = time.monotonic() + max_s
    try:
        while not ended.wait(_POLL_S):
            if time.monotonic() > until:
                raise StageError(f"{kind.title} did not end within {max_s:g} s; see {display_path(log)}")
        if program.code != 0:
            known = kind.explain(program.tail(1000))
            lines = [f"{kind.title}: {program.ended()}", *([known] if known else []), program.tail()]
            raise StageError("\n".join(lines))
    finally:
        program.stop(_GRACE_S)


def _count_problems(completed: int, failed: int, order: Sequence[int]) -> list[str]:
    problems = [f"{failed:,} requests failed"] if failed else []
    if completed + failed < len(order):
        problems.append(f"{completed:,} of {len(order):,} requests were completed")
    return problems
