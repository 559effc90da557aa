"""A command under an mpirun that is not one of its ranks' programs ends with it, even when that is killed.

A rank that has started MPI is ended by its launcher, or notices that it is gone. `run-llm-server` may not
start MPI at all, and `make` may stand between: nobody tells it.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil

from launch.launcher import find_launcher

# What the parent of ranks is called: Open MPI's and PRRTE's, MPICH's, Slurm's.
_LAUNCHERS = {
    *("mpirun", "mpiexec", "prterun", "prted", "prun", "orterun", "orted"),
    *("hydra_pmi_proxy", "mpiexec.hydra", "slurmstepd", "srun"),
}
_LOOK_S = 0.5


def end_with_launcher() -> None:
    """Send this process SIGTERM once its launcher, or what stands between the two, has ended."""
    if find_launcher() is None:
        return
    watched: list[psutil.Process] = []
    for process in psutil.Process().parents():
        watched.append(process)
        if process.name() in _LAUNCHERS:
            threading.Thread(target=_watch, args=(watched,), name="launcher", daemon=True).start()
            return


def _watch(watched: list[psutil.Process]) -> None:
    while all(map(_runs, watched)):
        time.sleep(_LOOK_S)
    os.kill(os.getpid(), signal.SIGTERM)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
