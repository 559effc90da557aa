"""The cluster report: from one process to a run over all hosts, step by step, in one file to be sent."""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from disagg.errors import ConfigError
from launch.check_world import library_title
from launch.children import Children, tail
from launch.command import Command
from mpillm import __version__
from mpillm.doctor.findings import Status
from mpillm.errors import ExitCode

_STEP_S = 300.0  # each step has deadlines of its own; this is one more
_ASK_S = 20.0
_TAIL = 120  # lines of a step's output
_MPILLM = (sys.executable, "-m", "mpillm")
_HAS = "This file has names of hosts, addresses and folders; no keys, no variables but these of Slurm."


class Step(NamedTuple):
    """Something to try."""

    name: str
    shows: str  # that it works means this
    argv: tuple[str, ...]
    run: Path | None = None  # the run directory; None: it is the doctor
    victim: int | None = None  # the rank that is killed in the test


@dataclass
class Done:
    """What came of it."""

    step: Step
    status: Status
    told: str  # in a line
    seconds: float = 0.0
    output: str = ""


def slurm_pmi(library: str) -> str:
    """Return the --mpi of srun for an MPI library; "" without srun, or outside an allocation."""
    if "SLURM_JOB_ID" not in os.environ or shutil.which("srun") is None:
        return ""
    wanted = ("pmi2",) if "MPICH" in library.upper() else ("pmix", "pmi2")
    try:
        asked = subprocess.run(["srun", "--mpi=list"], capture_output=True, text=True, timeout=_ASK_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    offered = {word.strip(",") for word in (asked.stdout + asked.stderr).split()}
    return next((kind for kind in wanted if kind in offered), "")


def ranks_of(mpirun: Sequence[str]) -> int:
    """Return how many ranks these words of mpirun start. Raises ConfigError if they do not say."""
    for option, value in itertools.pairwise(mpirun):
        if option in ("-n", "-np", "--np", "-c") and value.isdecimal() and int(value) > 1:
            return int(value)
    raise ConfigError(
        f"--mpirun {shlex.join(mpirun)!r} must have -n N, with two ranks or more", about=["mpirun"]
    )


def steps(mpirun: Sequence[str], pmi: str, folder: Path) -> list[Step]:
    """Return what to try: alone, then with each launcher (srun if there is a `pmi`), simple things first.

    `mpirun`: its words (``-n 4 -H a:2,b:2``). `folder`: for the runs.
    """
    ranks = ranks_of(mpirun)
    found = [
        Step(
            "this machine",
            "mpillm, its packages and MPI are installed, limits and disk are enough",
            (*_MPILLM, "doctor", "--log_dir", str(folder)),
        )
    ]
    heads = {"mpirun": (*_MPILLM, "mpirun", *mpirun)}
    if pmi:
        heads["srun"] = (
            "srun",
            f"--mpi={pmi}",
            "-n",
            str(ranks),
            "--kill-on-bad-exit=0",
            "--wait=60",
            *_MPILLM,
        )
    for launcher, head in heads.items():
        test = (*head, "run", "--core_type", "dummy", "--join_deadline", "60")
        end = ("--heartbeat_timeout", "20", "--load_deadline", "60")
        killed = ("--core_options", f"fault:exit,fault_phase:test,fault_rank:{ranks - 1}")
        runs = {name: folder / f"{launcher}-{name}" for name in ("test", "loss")}
        found += [
            Step(
                f"hosts, by {launcher}",
                "ranks start on all hosts and reach each other; ports, clocks, limits and GPUs are right",
                (*head, "doctor", "--log_dir", str(folder)),
            ),
            Step(
                f"a test, by {launcher}",
                "a run without a model ends VALID",
                (*test, *end, "--log_dir", str(runs["test"])),
                runs["test"],
            ),
            Step(
                f"a lost rank, by {launcher}",
                f"rank {ranks - 1}, which kills itself, is named in time",
                (*test, *end, *killed, "--log_dir", str(runs["loss"])),
                runs["loss"],
                ranks - 1,
            ),
        ]
    return found


def take(step: Step, folder: Path) -> Done:
    """Take a step; return what came of it."""
    log = folder / f"{step.name.replace(' ', '-').replace(',', '')}.txt"
    started = time.monotonic()
    with Children() as children:
        child = children.start(step.name, step.argv, Command(step.argv).environment(), log)
        code = children.wait(child, _STEP_S)
    done = Done(step, Status.FAILURE, "", time.monotonic() - started, tail(log, _TAIL))
    if code is None:
        done.told = f"not done within {_STEP_S:g} s"
    elif step.run is None:
        _judge_doctor(done, code, log)
    else:
        _judge_run(done, code, step.run)
    return done


def _judge_doctor(done: Done, code: int, log: Path) -> None:
    text = log.read_text(encoding="utf-8", errors="replace")
    where = re.search(r"^mpillm \S+ doctor: (.*)$", text, re.MULTILINE)
    if where is None:
        done.told = f"exit code {code}, and no findings"
        return
    told = {
        status: re.findall(rf"^  {status.value} +(.*)$", text, re.MULTILINE)
        for status in (Status.FAILURE, Status.WARNING)
    }
    done.status = next((status for status, lines in told.items() if lines), Status.OK)
    if code != ExitCode.DONE:
        done.status = Status.FAILURE
    first = next((f"; {' '.join(lines[0].split())}" for lines in told.values() if lines), "")
    done.told = f"{where[1]}{first}"


def _judge_run(done: Done, code: int, run: Path) -> None:
    try:
        result: dict[str, Any] = json.loads((run / "result.json").read_text(encoding="utf-8"))
        failures = result.get("failures", [])
        status, told = result["status"], [one["rank"] for one in failures]
    except (OSError, ValueError, KeyError, TypeError):
        done.told = f"exit code {code}, and no result.json in {run}"
        return
    if done.step.victim is None:
        done.told = f"{status}, exit code {code}"
        done.status = Status.OK if (status, code) == ("VALID", ExitCode.DONE) else Status.FAILURE
        return
    named = status == "FAILED" and told == [done.step.victim] and code != ExitCode.DONE
    done.status = Status.OK if named else Status.FAILURE
    cause = failures[0]["cause"].splitlines()[0] if failures else "no failure is told"
    done.told = f"{'named' if named else 'not named'} ({cause}), exit code {code}"


def head(typed: Sequence[str], library: str) -> list[str]:
    """Return the first lines: what, when, where."""
    slurm = {
        name.removeprefix("SLURM_").lower(): os.environ[name]
        for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NTASKS", "SLURM_TASKS_PER_NODE")
        if name in os.environ
    }
    return [
        f"Cluster report of mpillm {__version__}, {time.strftime('%Y-%m-%d %H:%M:%S %Z')}",
        f"typed: {Command(('python', '-m', 'mpillm', 'doctor', *typed))}",
        f"on: {platform.node()}, {platform.platform()}, Python {platform.python_version()}",
        f"MPI: {library_title(library) if library else 'none that mpi4py can load'}",
        f"Slurm: {', '.join(f'{name} {value}' for name, value in slurm.items()) or 'no allocation'}",
        _HAS,
    ]


def summary(all_done: Sequence[Done]) -> list[str]:
    """Return a line for each step, and what to do next."""
    width = max(len(done.step.name) for done in all_done)
    lines = [
        f"  {done.status.value:<8} {done.step.name:<{width}}  {done.seconds:5.1f} s  {done.told}"
        for done in all_done
    ]
    bad = [done for done in all_done if done.status is Status.FAILURE]
    if not bad:
        return [
            *lines,
            "",
            "Every step has worked: type the line of a test with your model and your options.",
        ]
    return [*lines, "", f"First: {bad[0].step.name}. It would show: {bad[0].step.shows}."]


def report(typed: Sequence[str], library: str, all_done: Sequence[Done]) -> str:
    """Return the file's text."""
    parts = [*head(typed, library), "", *summary(all_done)]
    for number, done in enumerate(all_done, 1):
        step = done.step
        parts += [
            "",
            f"== {number}. {step.name}: {done.status.value}, {done.told}",
            f"   shows: {step.shows}",
        ]
        parts += [f"   $ {Command(step.argv)}", *([done.output] if done.output else [])]
    return "\n".join(parts) + "\n"
