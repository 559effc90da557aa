"""A point of a curve, measured by MLCommons' client as it is: Standardized entries need it."""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError
from launch.owned_server import OwnedServer
from mpillm.errors import StageError
from mpillm.files import read_object
from mpillm.harnesses.inference_endpoint import CONFIG_LEFT, SUMMARY_LEFT
from mpillm.harnesses.kind import Load
from mpillm.harnesses.kinds import kind_of
from mpillm.report.run_directory import path_shown
from mpillm.roles.client_program import command_of
from mpillm.submission.endpoint_points import CONFIG, SUMMARY

_TRIES = 3  # of a number of requests that takes long enough
_MORE = 1.3  # requests than the rate so far asks for
_LONGEST_S = 86400.0  # of a point
_GRACE_S = 5.0
_LOOK_S = 0.5


def measured_point(load: Load, folder: Path, lasts_s: float, rate: float) -> dict[str, Any]:
    """Measure a point with `load`; leave the client's summary and configuration in `folder`.

    The client takes a number of requests and no time: a point that was too short is measured again, with
    more. `load.order` has the fewest; `rate`: requests per second, as far as that is known. Returns the
    summary. Raises ConfigError if the client is not there, StageError if it fails.
    """
    n = max(len(load.order), math.ceil(_MORE * rate * lasts_s))
    for _ in range(_TRIES):
        if load.folder.exists():  # with the report of an earlier try
            shutil.rmtree(load.folder)
        asked = replace(load, order=range(n))
        run_client(asked, load.folder.with_suffix(".log"))
        summary = read_object(load.folder / SUMMARY_LEFT)
        seconds = (summary["duration_ns"] or 0) / 1e9
        if seconds >= lasts_s:
            shutil.copyfile(load.folder / SUMMARY_LEFT, folder / SUMMARY)
            shutil.copyfile(load.folder / CONFIG_LEFT, folder / CONFIG)
            return summary
        n = max(n + 1, math.ceil(_MORE * n * lasts_s / max(seconds, 1e-3)))
    raise StageError(f"{n:,} requests would still take less than {lasts_s:g} s")


def run_client(load: Load, log: Path) -> None:
    """Run MLCommons' client to its end. Raises ConfigError if it is not there, StageError if it fails."""
    kind = kind_of("inference-endpoint")
    command = command_of(kind, load)
    load.folder.mkdir(parents=True, exist_ok=True)
    kind.write(load)
    ended = threading.Event()
    program = OwnedServer(command, log, ended.set, _GRACE_S, outlives_s=_GRACE_S)
    until = time.monotonic() + _LONGEST_S
    try:
        while not ended.wait(_LOOK_S):
            if time.monotonic() > until:
                raise StageError(f"{kind.title} did not end within {_LONGEST_S:g} s; see {path_shown(log)}")
        if program.code != 0:
            known = kind.explain(program.tail(1000))
            lines = [f"{kind.title}: {program.ended()}", *([known] if known else []), program.tail()]
            raise StageError("\n".join(lines))
    finally:
        program.stop(_GRACE_S)
    try:
        report = kind.read(load)
    except (ConfigError, OSError, LookupError, TypeError, ValueError) as error:
        raise StageError(f"{kind.title}: its report can't be read: {error!r}") from error
    if problems := [*report.problems, *_of_counts(report.completed, report.failed, load.order)]:
        raise StageError(f"{kind.title}: {'; '.join(problems)}; see {path_shown(log)}")


def _of_counts(completed: int, failed: int, order: Sequence[int]) -> list[str]:
    found = [f"{failed:,} requests failed"] if failed else []
    if completed + failed < len(order):
        found.append(f"{completed:,} of {len(order):,} requests were completed")
    return found
