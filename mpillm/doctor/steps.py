"""Steps that run one after the other, each a command, with a report of their results in one file."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from disagg.errors import ConfigError
from launch.check_world import library_title
from launch.children import Child, Children, end_of, tail
from launch.command import Command
from launch.launcher import EveryRankError
from launch.own_messages import why_ended
from mpillm.comms.start import mpi_library
from mpillm.doctor.findings import Status
from mpillm.errors import ExitCode
from mpillm.version import __version__

_TAIL = 120  # lines of a step's output
_CONTENTS = "This file has names of hosts, addresses and folders; no keys, no variables but these of Slurm."

Judge = Callable[[int, Path], tuple[Status, str]]
"""Judges a step by its exit code and the log of its output; returns the status and a summary."""


class Step(NamedTuple):
    """A command to try."""

    name: str
    shows: str  # what success means
    argv: tuple[str, ...]
    judge: Judge
    disturb: Callable[[Child], str] | None = None  # disturbs the running command; returns a description
    why_not: str = ""  # why it cannot run here


@dataclass
class StepResult:
    """Result of a step."""

    step: Step
    status: Status
    text: str  # one line
    seconds: float = 0.0
    output: str = ""


def run_step(step: Step, folder: Path, deadline_s: float) -> StepResult:
    """Run a step. Its own deadlines should end it before `deadline_s`."""
    if step.why_not:
        return StepResult(step, Status.SKIPPED, step.why_not)
    log = folder / f"{step.name.replace(' ', '-').replace(',', '')}.txt"
    started, disturbance = time.monotonic(), ""
    with Children() as children:
        child = children.start(step.name, step.argv, Command(step.argv).environment(), log)
        if step.disturb is not None:
            disturbance = f"{step.disturb(child)}: "
        left = deadline_s - (time.monotonic() - started)
        code = children.wait(child, max(0.0, left))
    status, text = Status.FAILURE, f"not done within {deadline_s:g} s"
    if code is not None:
        status, text = step.judge(code, log)
    return StepResult(step, status, f"{disturbance}{text}", time.monotonic() - started, tail(log, _TAIL))


def read_result(run: Path) -> dict[str, Any]:
    """Return a run's result.json; {} if there is none that can be read."""
    try:
        result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return result if isinstance(result, dict) and "status" in result else {}


def must_be_valid(run: Path) -> Judge:
    """Return the judge of a test that must end VALID."""

    def judge(code: int, log: Path) -> tuple[Status, str]:
        if not (result := read_result(run)):
            return Status.FAILURE, f"no result.json in {run}, {why_ended(code, end_of(log))}"
        good = (result["status"], code) == ("VALID", ExitCode.DONE)
        return Status.OK if good else Status.FAILURE, f"{result['status']}, exit code {code}{_cause(result)}"

    return judge


def must_be_named(run: Path, is_named: Callable[[dict[str, Any]], bool], codes: Sequence[int] = ()) -> Judge:
    """Return the judge of a run that must fail with a single failure, for which `is_named` is true."""

    def judge(code: int, log: Path) -> tuple[Status, str]:
        if not (result := read_result(run)):
            return Status.FAILURE, f"no result.json in {run}, {why_ended(code, end_of(log))}"
        failures = result.get("failures") or []
        named = result["status"] == "FAILED" and len(failures) == 1 and is_named(failures[0])
        named = named and (code in codes if codes else code != ExitCode.DONE)
        cause = failures[0]["cause"].splitlines()[0] if failures else "no failure is reported"
        summary = f"{'named' if named else 'not named'} ({cause}), exit code {code}"
        return Status.OK if named else Status.FAILURE, summary

    return judge


def _cause(result: dict[str, Any]) -> str:
    failures = result.get("failures") or []
    return f": {failures[0]['cause'].splitlines()[0]}" if failures else ""


def head(title: str, typed: Sequence[str], library: str) -> list[str]:
    """Return the first lines of a report: title, time, place. `typed`: the command and its arguments."""
    slurm = {
        name.removeprefix("SLURM_").lower(): os.environ[name]
        for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NTASKS", "SLURM_TASKS_PER_NODE")
        if name in os.environ
    }
    return [
        f"{title} of mpillm {__version__}, {time.strftime('%Y-%m-%d %H:%M:%S %Z')}",
        f"typed: {Command(('python', '-m', 'mpillm', *typed))}",
        f"on: {platform.node()}, {platform.platform()}, Python {platform.python_version()}",
        f"MPI: {library_title(library) if library else 'none that mpi4py can load'}",
        f"Slurm: {', '.join(f'{name} {value}' for name, value in slurm.items()) or 'no allocation'}",
        _CONTENTS,
    ]


def summary(results: Sequence[StepResult], good: str) -> list[str]:
    """Return a line for each step, and advice; `good`: advice if every step has worked."""
    width = max(len(result.step.name) for result in results)
    lines = [
        f"  {result.status.value:<8} {result.step.name:<{width}}  {result.seconds:5.1f} s  {result.text}"
        for result in results
    ]
    bad = [result for result in results if result.status is Status.FAILURE]
    if not bad:
        return [*lines, "", good]
    return [*lines, "", f"First: {bad[0].step.name}. It would show: {bad[0].step.shows}."]


def report(first: Sequence[str], results: Sequence[StepResult], good: str) -> str:
    """Return the text of a report; `first`: its `head`."""
    parts = [*first, "", *summary(results, good)]
    for number, result in enumerate(results, 1):
        step = result.step
        parts += [
            "",
            f"== {number}. {step.name}: {result.status.value}, {result.text}",
            f"   shows: {step.shows}",
        ]
        parts += [f"   $ {Command(step.argv)}"] if step.argv else []
        parts += [result.output] if result.output else []
    return "\n".join(parts) + "\n"


class StepRunner(NamedTuple):
    """Runs steps and writes their report."""

    file: Path
    folder: Path  # of the runs
    first: list[str]  # its `head`
    library: str  # MPI library; "": mpi4py can load none

    def run_all(self, steps: Sequence[Step], good: str, deadline_s: float) -> int:
        """Run the steps; print each and rewrite the file after it. Return STAGE_FAILED if one failed."""
        results: list[StepResult] = []
        for step in steps:
            print(f"  {step.name} …", flush=True)
            results.append(run_step(step, self.folder, deadline_s))
            self.file.write_text(report(self.first, results, good), encoding="utf-8")
        print("", *summary(results, good), "", f"report: {self.file}", sep="\n", flush=True)
        failed = any(result.status is Status.FAILURE for result in results)
        return int(ExitCode.STAGE_FAILED if failed else ExitCode.DONE)


@contextlib.contextmanager
def step_runner(title: str, typed: Sequence[str], file: str, log_dir: str) -> Iterator[StepRunner]:
    """Provide a runner of steps with a temporary folder in `log_dir`.

    `title`, `typed`: see `head`. Raises ConfigError if the file or the folder cannot be written.
    """
    library = ""
    try:
        Path(file).write_text("", encoding="utf-8")  # fails now rather than after minutes
        Path(log_dir).mkdir(parents=True, exist_ok=True)  # all nodes may need it
        library = mpi_library()
    except OSError as error:
        raise ConfigError(f"{error.filename or file}: {error.strerror or error}") from None
    except EveryRankError:
        pass
    first = head(title, typed, library)
    with tempfile.TemporaryDirectory(prefix=f"{typed[0]}-", dir=log_dir) as folder:
        yield StepRunner(Path(file), Path(folder).absolute(), first, library)
