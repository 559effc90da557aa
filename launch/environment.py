"""The environment that a started process gets, and what a launcher and its ranks tell each other through it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from disagg.errors import ConfigError

EXIT_FILE = "MPILLM_EXIT_FILE"
"""Path of the file in which rank 0 leaves its exit code for the launcher; beside it it leaves `_STARTED` before that."""

_STARTED = "started"

TTY = "MPILLM_TTY"
"""Set to 1 when the launcher's standard output is a terminal: rank 0 may redraw a line."""

# What a launcher sets for one rank of one job. A process that inherits these takes itself for that rank.
_JOB = re.compile(
    r"""
      OMPI_(?!MCA_|ALLOW_RUN_AS_ROOT).*
    | PMIX_(?!MCA_).*
    | PRTE_(?!MCA_).*
    | PMI_.* | PMI2_.* | HYDI_.* | MPI_LOCAL(NRANKS|RANKID) | MPIEXEC_.* | GFORTRAN_UNBUFFERED_PRECONNECTED
    | SLURM_(PROCID|LOCALID|NODEID|GTIDS|TASK_PID|STEPID|STEPMGR|STEP_.*|SRUN_.*|LAUNCH_NODE_IPADDR|MPI_TYPE|PMI.*|CPU_BIND.*|MEM_BIND.*)
    | MPILLM_(EXIT_FILE|TTY)
    """,
    re.VERBOSE,
)

# Open MPI's parameters travel under one prefix, whether a person or mpirun set them. These are the ones that mpirun sets by itself.
_MPIRUN_MCA = re.compile(
    r"""
      OMPI_MCA_(PREFIXES|cpu_type|initial_wdir|num_procs|mpi_ft_enable|mpi_oversubscribe|rmaps_base_oversubscribe|shmem_RUNTIME_QUERY_hint|pmix)
    | OMPI_MCA_(ess|orte)(_.*)?
    | PMIX_MCA_mca_base_component_show_load_errors
    | (PMIX|PRTE)_MCA_(prte|prefix)_.*
    """,
    re.VERBOSE,
)

_OPEN_MPI_RANK = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK")


def clean_environment(env: Mapping[str, str]) -> dict[str, str]:
    """A copy of `env` for a process that is not a rank of the job that this process may be a rank of.

    Use it for every child process: a server, an `srun`, another `mpirun`. It drops what `mpirun` or `srun` set for one
    rank (`OMPI_COMM_WORLD_*`, `PMIX_*`, `PRTE_*`, `PMI_*`, `SLURM_PROCID`, `SLURM_STEP_*`, …) and keeps what a person set:

    - `OMPI_MCA_*`, `PMIX_MCA_*`, `PRTE_MCA_*` stay (they tune, they don't identify), except the few that `mpirun` sets
      by itself and only when this process is an Open MPI rank. A value given as `mpirun --mca name value` therefore also reaches
      the children, as if it had been exported.
    - `OMPI_ALLOW_RUN_AS_ROOT*`, `MPIR_CVAR_*`, `HYDRA_*` stay.
    - `SLURM_JOB_*` and the other variables of the allocation stay: a child `srun` belongs in it.
    - `OPAL_PREFIX` and its library folder in `LD_LIBRARY_PATH` go only when this process is an Open MPI rank: there
      `mpirun` put them.
    """
    clean = {name: value for name, value in env.items() if not _JOB.fullmatch(name)}
    if not any(name in env for name in _OPEN_MPI_RANK):
        return clean
    clean = {name: value for name, value in clean.items() if not _MPIRUN_MCA.fullmatch(name)}
    prefix = clean.pop("OPAL_PREFIX", None)
    if prefix is not None and "LD_LIBRARY_PATH" in clean:
        folders = [folder for folder in clean["LD_LIBRARY_PATH"].split(os.pathsep) if folder and folder != os.path.join(prefix, "lib")]  # noqa: PTH118
        clean["LD_LIBRARY_PATH"] = os.pathsep.join(folders)
        if not folders:
            del clean["LD_LIBRARY_PATH"]
    return clean


def launched_size(env: Mapping[str, str]) -> int | None:
    """Of how many processes, all started by one `mpirun` or `srun`, this is one; None if it was started alone."""
    if "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env:
        return int(env["SLURM_STEP_NUM_TASKS"])
    return next((int(env[name]) for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE") if name in env), None)


def rank_environment(env: Mapping[str, str], exit_file: Path, tty: bool) -> dict[str, str]:
    """The environment of `mpirun` and, through it, of the ranks."""
    ranks = clean_environment(env)
    ranks[EXIT_FILE] = str(exit_file)
    ranks["PYTHONUNBUFFERED"] = "1"
    if tty:
        ranks[TTY] = "1"
    return ranks


def tell_started(env: Mapping[str, str] = os.environ) -> None:
    """Tell the launcher, if one wants to know, that rank 0 runs: from here on it keeps the deadlines. On other ranks nothing.

    ConfigError: rank 0 is on another host, which does not see the launcher's working directory.
    """
    if EXIT_FILE not in env or next((env[name] for name in (*_OPEN_MPI_RANK, "PMI_RANK") if name in env), None) != "0":
        return
    try:
        Path(env[EXIT_FILE]).with_name(_STARTED).touch()
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: {error.strerror}: rank 0 is on a host that does not see this folder of `mpillm mpirun`;"
            " start it in a folder that all hosts share"
        ) from error


def told_started(exit_file: Path) -> bool:
    """Whether rank 0 has."""
    return exit_file.with_name(_STARTED).exists()


def tell_exit_code(code: int, env: Mapping[str, str] = os.environ) -> None:
    """Leave rank 0's exit code for the launcher, if a launcher asked for it.

    Only rank 0 may call this, as the last thing before it ends (or before `MPI_Abort`): `mpirun`'s own status says
    little after a rank was lost. The launcher gives the other ranks a grace time from here, then ends them.
    """
    name = env.get(EXIT_FILE)
    if name is None:
        return
    path = Path(name)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(f"{code}\n", encoding="ascii")
    draft.replace(path)


def told_exit_code(exit_file: Path) -> int | None:
    """The code that rank 0 left in `exit_file`, or None when it left none."""
    try:
        return int(exit_file.read_text(encoding="ascii"))
    except FileNotFoundError:
        return None
