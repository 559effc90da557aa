"""Runs and servers of mpillm as child processes of a program, started as a user starts them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError
from launch.children import Children, end_of, tail
from launch.command import Command
from launch.environment import without_secrets
from launch.live_lines import LiveLines
from launch.own_messages import cause_in
from launch.signals import StopSignal
from launch.supervisor import MPIRUN_GRACE_S
from mpillm.loadgen.logs import latencies_ms
from mpillm.report.numbers import duration
from mpillm.report.run_directory import HAS_FIGURES, keep_results

_DEADLINE_S = 600.0  # for a complete run, and for a server to become ready
_LOOK_S = 0.1
_LINES = 8  # so many last lines of a run's output contain its phase or progress
_SHOW_S = 1.0
_WAITS = re.compile(r"\w+ after \d+ s ")
_BAR = re.compile(r"\[#*\.*\] ")
_URL = re.compile(r"serving (?:(?!serving ).)* at (http://\S+)")
CONSOLE = "console.txt"  # file in the run directory with the run's output


@dataclass(frozen=True)
class EndedRun:
    """Outcome of a run."""

    folder: Path
    code: int
    result: dict[str, Any]  # contents of result.json; {} if missing
    stopped: str = ""  # text with which the caller's `watch` ended the run
    tail: str = ""  # the end of the run's output
    message: str = ""  # the cause of a failure, read from the output

    @property
    def cause(self) -> str:
        """Why the run has no figures; "" after a successful test."""
        if self.result.get("status") in HAS_FIGURES:
            return ""
        causes = dict.fromkeys(str(one.get("cause")) for one in self.result.get("failures", ()))
        return "; ".join(causes) or self.message or f"exit code {self.code}"

    @property
    def failure(self) -> str:
        """The cause, the run directory and the end of the output; "" after a successful test."""
        if not self.cause:
            return ""
        tail = "" if self.cause == self.message else self.tail
        return f"{self.cause} (run directory {self.folder})\n{tail}".rstrip()


def run_in(
    folder: Path,
    mpirun: Sequence[str],
    options: Sequence[str],
    watch: Callable[[], str] | None = None,
    deadline_s: float | None = None,
    adopts: bool = True,
) -> EndedRun:
    """Run ``mpirun … run``; its output goes to a file in the run directory.

    Raises ConfigError after the deadline, and if `folder` already contains the results of a test.

    Args:
        folder: the run directory.
        mpirun: options of mpirun (``-n 4 --hostfile hosts``).
        options: options of ``run``.
        watch: called often, and after the end; if it returns a text, the run ends.
        deadline_s: deadline of the whole run, in addition to the run's deadlines for each phase.
        adopts: see `Children`.
    """
    if "--force" not in options:
        keep_results(folder)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / CONSOLE
    log.unlink(missing_ok=True)
    (folder / "result.json").unlink(missing_ok=True)
    others, secrets = without_secrets(options)
    command = Command((*_mpirun(mpirun), "run", *others, "--log_dir", str(folder)), secrets)
    stopped = ""
    end = None if deadline_s is None else time.monotonic() + deadline_s
    try:
        with _children(adopts) as children, _progress_of(folder, log) as show:
            child = children.start("the run", command.argv, command.environment(), log)
            while children.wait(child, _LOOK_S) is None:
                show()
                if watch is not None and (stopped := watch()):
                    break
                if end is not None and time.monotonic() > end:
                    raise ConfigError(f"the run in {folder} did not end within {deadline_s:g} s")
    except StopSignal as signal:
        signal.during = f"the run in {folder}"
        raise
    if watch is not None and not stopped:
        watch()  # the run's last lines
    code = child.process.returncode
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        result = {}
    return EndedRun(folder, code, result, stopped, child.tail(), cause_in(end_of(log)))


@contextlib.contextmanager
def _progress_of(folder: Path, log: Path) -> Iterator[Callable[[], None]]:
    """Yield a function that displays the progress of a run from its log.

    Without a terminal, the function only prints what the run waits for before its test.
    """
    lines, began, due, printed = LiveLines(sys.stdout, sys.stderr), time.monotonic(), 0.0, ""
    draws = sys.stdout.isatty()

    def show() -> None:
        nonlocal due, printed
        now = time.monotonic()
        if now < due:
            return
        due, progress = now + _SHOW_S, _last_line(log)
        line = f"  {folder.name}, {duration(now - began)}: {progress}"
        if draws:
            lines.draw([line])
        elif progress != printed and _WAITS.match(progress):
            printed = progress
            lines.write(f"{line}\n")

    try:
        yield show
    finally:
        lines.end()


def _last_line(log: Path) -> str:
    """Return the last line of a run's output that is not a continuation line, without its progress bar."""
    lines = [line.removeprefix("  | ") for line in tail(log, _LINES).splitlines()]
    # The mpirun command has several lines. All but the last line end with a backslash.
    firsts = (line for line in reversed(lines) if not line.startswith("    ") and not line.endswith("\\"))
    return " ".join(_BAR.sub("", next(firsts, "starts")).split())


def run_once(ranks: int, *options: str) -> dict[str, Any]:
    """Run a test on `ranks` ranks; return its result.json with `latencies_ms` and `rank_cores`.

    Raises ConfigError if the run fails.
    """
    with tempfile.TemporaryDirectory(prefix="mpillm-bench-") as directory:
        folder = Path(directory)
        ended = run_in(folder, ("-n", str(ranks)), options, deadline_s=_DEADLINE_S)
        if ended.code:
            raise ConfigError(f"a run of the benchmark failed with exit code {ended.code}: {ended.failure}")
        telemetry = json.loads((folder / "telemetry.json").read_text(encoding="utf-8"))
        return ended.result | {"latency_ms": latencies_ms(folder), "rank_cores": rank_cores(telemetry)}


@contextlib.contextmanager
def served_in(
    folder: Path,
    mpirun: Sequence[str],
    options: Sequence[str],
    watch: Callable[[], str] | None = None,
    deadline_s: float = _DEADLINE_S,
    adopts: bool = True,
) -> Iterator[str]:
    """Run ``mpirun … serve`` in a context; yield its URL when it is ready.

    The server ends with the context. Arguments as for `run_in`, but `deadline_s` is the time until the server
    must be ready. Raises ConfigError if it is not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / CONSOLE
    log.unlink(missing_ok=True)
    others, secrets = without_secrets(options)
    args = [*_mpirun(mpirun), "serve", "--port", "0", "--log_dir", str(folder), *others]
    with _children(adopts) as children:
        server = children.start("the server", args, os.environ | secrets, log)
        end = time.monotonic() + deadline_s
        while not (ready := _URL.search(log.read_text(encoding="utf-8", errors="replace"))):
            if watch is not None:
                watch()
            if children.ended() or time.monotonic() > end:
                why = cause_in(end_of(log)) or f"the end of its output:\n{server.tail()}"
                raise ConfigError(f"{server.name} is not ready: {why}")
            time.sleep(_LOOK_S)
        yield ready[1]


def rank_cores(telemetry: Mapping[str, Any]) -> list[float]:
    """Return the CPU cores that each rank used in the test; 0 if too short. `telemetry`: telemetry.json."""
    cores = []
    for rank in telemetry["ranks"].values():
        begin, end = next(ends for name, *ends in rank["phases"] if name == "test")
        samples = rank["samples"]
        looks = [
            (at, cpu)
            for at, cpu in zip(samples["seconds"], samples["cpu_s"], strict=True)
            if begin <= at <= end
        ]
        first, last = (looks[0], looks[-1]) if looks else ((0.0, 0.0), (0.0, 0.0))
        cores.append((last[1] - first[1]) / (last[0] - first[0]) if last[0] > first[0] else 0.0)
    return cores


def _mpirun(options: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "mpillm", "mpirun", *options]


def _children(adopts: bool = True) -> Children:
    return Children(MPIRUN_GRACE_S, pass_on=True, adopts=adopts)
