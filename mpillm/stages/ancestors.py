"""End a command under mpirun that does not start MPI together with its launcher, even if that is killed.

The launcher ends a rank that has started MPI, or the rank notices the loss. `run-llm-server` may not start
MPI, and `make` may run between it and the launcher.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil

from launch.launcher import find_launcher

# Names of the parent processes of ranks: Open MPI's and PRRTE's, MPICH's, Slurm's.
_LAUNCHERS = {
    *("mpirun", "mpiexec", "prterun", "prted", "prun", "orterun", "orted"),
    *("hydra_pmi_proxy", "mpiexec.hydra", "slurmstepd", "srun"),
}
_POLL_S = 0.5


def end_with_launcher() -> None:
    """Send this process SIGTERM when its launcher, or a process between the two, exits."""
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
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
