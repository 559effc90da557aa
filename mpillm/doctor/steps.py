"""Things that are tried one after the other, each a command, and what came of them in one file to be sent."""

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
_HAS = "This file has names of hosts, addresses and folders; no keys, no variables but these of Slurm."

Judge = Callable[[int, Path], tuple[Status, str]]
"""From a step's exit code and the log of its output to what came of it, and that in a line."""


class Step(NamedTuple):
    """Something to try."""

    name: str
    shows: str  # that it works means this
    argv: tuple[str, ...]
    judge: Judge
    disturb: Callable[[Child], str] | None = None  # what is done to it meanwhile; returns what was, in words
    why_not: str = ""  # it can't be tried here


@dataclass
class Done:
    """What came of it."""

    step: Step
    status: Status
    told: str  # in a line
    seconds: float = 0.0
    output: str = ""


def take(step: Step, folder: Path, deadline_s: float) -> Done:
    """Take a step; return what came of it. Its own deadlines should end it before `deadline_s`."""
    if step.why_not:
        return Done(step, Status.SKIPPED, step.why_not)
    log = folder / f"{step.name.replace(' ', '-').replace(',', '')}.txt"
    started, did = time.monotonic(), ""
    with Children() as children:
        child = children.start(step.name, step.argv, Command(step.argv).environment(), log)
        if step.disturb is not None:
            did = f"{step.disturb(child)}: "
        left = deadline_s - (time.monotonic() - started)
        code = children.wait(child, max(0.0, left))
    status, told = Status.FAILURE, f"not done within {deadline_s:g} s"
    if code is not None:
        status, told = step.judge(code, log)
    return Done(step, status, f"{did}{told}", time.monotonic() - started, tail(log, _TAIL))


def result_of(run: Path) -> dict[str, Any]:
    """Return a run's result.json; {} if it left none that can be read."""
    try:
        found = json.loads((run / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and "status" in found else {}


def must_be_valid(run: Path) -> Judge:
    """Return the judge of a test that is to end VALID."""

    def judge(code: int, log: Path) -> tuple[Status, str]:
        if not (result := result_of(run)):
            return Status.FAILURE, f"no result.json in {run}, {why_ended(code, end_of(log))}"
        good = (result["status"], code) == ("VALID", ExitCode.DONE)
        return Status.OK if good else Status.FAILURE, f"{result['status']}, exit code {code}{_cause(result)}"

    return judge


def must_be_named(run: Path, is_named: Callable[[dict[str, Any]], bool], codes: Sequence[int] = ()) -> Judge:
    """Return the judge of a run that is to fail, and to tell one failure, of which `is_named`."""

    def judge(code: int, log: Path) -> tuple[Status, str]:
        if not (result := result_of(run)):
            return Status.FAILURE, f"no result.json in {run}, {why_ended(code, end_of(log))}"
        told = result.get("failures") or []
        named = result["status"] == "FAILED" and len(told) == 1 and is_named(told[0])
        named = named and (code in codes if codes else code != ExitCode.DONE)
        cause = told[0]["cause"].splitlines()[0] if told else "no failure is told"
        said = f"{'named' if named else 'not named'} ({cause}), exit code {code}"
        return Status.OK if named else Status.FAILURE, said

    return judge


def _cause(result: dict[str, Any]) -> str:
    told = result.get("failures") or []
    return f": {told[0]['cause'].splitlines()[0]}" if told else ""


def head(what: str, typed: Sequence[str], library: str) -> list[str]:
    """Return the first lines of a report: what, when, where. `typed`: the command and its words."""
    slurm = {
        name.removeprefix("SLURM_").lower(): os.environ[name]
        for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NTASKS", "SLURM_TASKS_PER_NODE")
        if name in os.environ
    }
    return [
        f"{what} of mpillm {__version__}, {time.strftime('%Y-%m-%d %H:%M:%S %Z')}",
        f"typed: {Command(('python', '-m', 'mpillm', *typed))}",
        f"on: {platform.node()}, {platform.platform()}, Python {platform.python_version()}",
        f"MPI: {library_title(library) if library else 'none that mpi4py can load'}",
        f"Slurm: {', '.join(f'{name} {value}' for name, value in slurm.items()) or 'no allocation'}",
        _HAS,
    ]


def summary(all_done: Sequence[Done], good: str) -> list[str]:
    """Return a line for each step, and what to do next; `good`: if every step has worked."""
    width = max(len(done.step.name) for done in all_done)
    lines = [
        f"  {done.status.value:<8} {done.step.name:<{width}}  {done.seconds:5.1f} s  {done.told}"
        for done in all_done
    ]
    bad = [done for done in all_done if done.status is Status.FAILURE]
    if not bad:
        return [*lines, "", good]
    return [*lines, "", f"First: {bad[0].step.name}. It would show: {bad[0].step.shows}."]


def report(first: Sequence[str], all_done: Sequence[Done], good: str) -> str:
    """Return the file's text; `first`: its `head`."""
    parts = [*first, "", *summary(all_done, good)]
    for number, done in enumerate(all_done, 1):
        step = done.step
        parts += [
            "",
            f"== {number}. {step.name}: {done.status.value}, {done.told}",
            f"   shows: {step.shows}",
        ]
        parts += [f"   $ {Command(step.argv)}"] if step.argv else []
        parts += [done.output] if done.output else []
    return "\n".join(parts) + "\n"


class Taken(NamedTuple):
    """Where a report is written, and what MPI it is about."""

    file: Path
    folder: Path  # of the runs
    first: list[str]  # its `head`
    library: str  # "": mpi4py can load none

    def take_all(self, steps: Sequence[Step], good: str, deadline_s: float) -> int:
        """Take the steps, tell of each, write the file anew after each. Return STAGE_FAILED if one failed."""
        all_done: list[Done] = []
        for step in steps:
            print(f"  {step.name} …", flush=True)
            all_done.append(take(step, self.folder, deadline_s))
            self.file.write_text(report(self.first, all_done, good), encoding="utf-8")
        print("", *summary(all_done, good), "", f"report: {self.file}", sep="\n", flush=True)
        failed = any(done.status is Status.FAILURE for done in all_done)
        return int(ExitCode.STAGE_FAILED if failed else ExitCode.DONE)


@contextlib.contextmanager
def taken(what: str, typed: Sequence[str], file: str, log_dir: str) -> Iterator[Taken]:
    """In the block, take the steps of a report, `what`, with a folder of their own in `log_dir`.

    `typed`: the command and its words. Raises ConfigError if the file or the folder can't be written, before
    anything is tried.
    """
    library = ""
    try:
        Path(file).write_text("", encoding="utf-8")  # now, not after minutes
        Path(log_dir).mkdir(parents=True, exist_ok=True)  # all nodes may have to see it
        library = mpi_library()
    except OSError as error:
        raise ConfigError(f"{error.filename or file}: {error.strerror or error}") from None
    except EveryRankError:
        pass
    first = head(what, typed, library)
    with tempfile.TemporaryDirectory(prefix=f"{typed[0]}-", dir=log_dir) as folder:
        yield Taken(Path(file), Path(folder).absolute(), first, library)
