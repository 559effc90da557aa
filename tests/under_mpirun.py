"""``python tests/under_mpirun.py -n N [pytest options]``: pytest on every rank, with the mpirun of this
Python's MPI.

Rank 0 reports; another rank's report is shown only when it fails. The exit code is mpirun's: not 0 if any
rank failed.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from disagg.errors import ConfigError
from launch.check_world import WrongLauncher
from launch.environment import clean_environment
from launch.find_mpirun import detect
from launch.launcher import find_launcher, refuse_copies
from launch.mpirun import command_line, usable_cores
from mpillm.comms.start import start_mpi

TIMEOUT_S = 900


def start(ranks: int, arguments: list[str]) -> int:
    """Run this file on `ranks` ranks."""
    program = [sys.executable, "-u", __file__, *arguments]
    line = command_line(detect(), ranks, program, root=os.geteuid() == 0, cores=usable_cores(), survive=False)
    with tempfile.TemporaryDirectory(prefix="mpillm-") as folder:  # what a killed mpirun leaves goes with it
        env = {**clean_environment(os.environ), "TMPDIR": folder}
        return subprocess.run(line, env=env, stdin=subprocess.DEVNULL, timeout=TIMEOUT_S).returncode


def rank(number: int, arguments: list[str]) -> int:
    """Run pytest as rank `number`."""
    start_mpi([], TIMEOUT_S).Free()
    options = ["--with-mpi", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=60"]
    # `start` deletes all folders. A rank must not delete its own sooner, because others may still read it.
    options += ["-o", "tmp_path_retention_policy=all", *arguments]
    if number == 0:
        return int(pytest.main(options))
    report = io.StringIO()
    with contextlib.redirect_stdout(report):
        code = int(pytest.main(options))
    if code != 0:
        print(f"--- rank {number} ---\n{report.getvalue()}", flush=True)
    return code


if __name__ == "__main__":
    try:
        if sys.argv[1:2] == ["-n"] and len(sys.argv) > 2:
            refuse_copies(Path(__file__).name)
            sys.exit(start(int(sys.argv[2]), sys.argv[3:]))
        launcher = find_launcher()
        sys.exit(rank(launcher.rank or 0, sys.argv[1:]) if launcher else __doc__)
    except WrongLauncher as error:
        sys.exit(f"mpillm: {error.problem}; start {Path(__file__).name} without mpirun: -n N")
    except ConfigError as error:
        sys.exit(f"mpillm: {error}")
