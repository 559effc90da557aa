"""The cluster report: steps from one process to a run over all hosts, recorded in one file."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from disagg.errors import ConfigError
from launch.safe_text import whole_number
from mpillm.doctor.findings import Status
from mpillm.doctor.steps import Step, must_be_named, must_be_valid
from mpillm.errors import ExitCode

STEP_S = 300.0
"""Deadline of a step, beyond the deadlines that it sets itself."""

GOOD = "Every step has worked: type the line of a test with your model and your options."
_SRUN_S = 20.0
_MPILLM = (sys.executable, "-m", "mpillm")


def slurm_pmi(library: str) -> str:
    """Return the --mpi of srun for an MPI library; "" without srun, or outside an allocation."""
    if "SLURM_JOB_ID" not in os.environ or shutil.which("srun") is None:
        return ""
    usable = ("pmi2",) if "MPICH" in library.upper() else ("pmix", "pmi2")
    try:
        listing = subprocess.run(["srun", "--mpi=list"], capture_output=True, text=True, timeout=_SRUN_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    offered = {word.strip(",") for word in (listing.stdout + listing.stderr).split()}
    return next((kind for kind in usable if kind in offered), "")


def ranks_of(mpirun: Sequence[str]) -> int:
    """Return the number of ranks that these arguments of mpirun start.

    Raises ConfigError if it is not there, or below 2.
    """
    for option, value in itertools.pairwise(mpirun):
        if option in ("-n", "-np", "--np", "-c") and (number := whole_number(value) or 0) > 1:
            return number
    raise ConfigError(
        f"--mpirun {shlex.join(mpirun)!r} must have -n N, with two ranks or more", about=["mpirun"]
    )


def plan_steps(mpirun: Sequence[str], pmi: str, folder: Path) -> list[Step]:
    """Return the steps, simple ones first: one process, then each launcher (srun if there is a `pmi`).

    `mpirun`: its arguments (``-n 4 -H a:2,b:2``). `folder`: for the runs.
    """
    ranks = ranks_of(mpirun)
    steps = [
        Step(
            "this machine",
            "mpillm, its packages and MPI are installed, limits and disk are enough",
            (*_MPILLM, "doctor", "--log_dir", str(folder)),
            _judge_doctor,
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
        steps += [
            Step(
                f"hosts, by {launcher}",
                "ranks start on all hosts and reach each other; ports, clocks, limits and GPUs are right",
                (*head, "doctor", "--log_dir", str(folder)),
                _judge_doctor,
            ),
            Step(
                f"a test, by {launcher}",
                "a run without a model ends VALID",
                (*test, *end, "--log_dir", str(runs["test"])),
                must_be_valid(runs["test"]),
            ),
            Step(
                f"a lost rank, by {launcher}",
                f"rank {ranks - 1}, which kills itself, is named in time",
                (*test, *end, *killed, "--log_dir", str(runs["loss"])),
                must_be_named(runs["loss"], lambda failure: failure["rank"] == ranks - 1),
            ),
        ]
    return steps


def _judge_doctor(code: int, log: Path) -> tuple[Status, str]:
    text = log.read_text(encoding="utf-8", errors="replace")
    header = re.search(r"^mpillm \S+ doctor: (.*)$", text, re.MULTILINE)
    if header is None:
        return Status.FAILURE, f"exit code {code}, and no findings"
    findings = {
        status: re.findall(rf"^  {status.value} +(.*)$", text, re.MULTILINE)
        for status in (Status.FAILURE, Status.WARNING)
    }
    status = next((status for status, lines in findings.items() if lines), Status.OK)
    if code != ExitCode.DONE:
        status = Status.FAILURE
    first = next((f"; {' '.join(lines[0].split())}" for lines in findings.values() if lines), "")
    return status, f"{header[1]}{first}"
