"""The launcher that started this process, with its rank and the number of ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from disagg.errors import ConfigError
from launch.safe_text import whole_number

RANK_COMMANDS = ("run", "serve", "doctor", "generate-disagg-config", "run-llm-server")
"""The mpillm commands that may run as several ranks of one launcher."""

OPEN_MPI = "Open MPI's mpirun"
HYDRA = "MPICH's mpirun (Hydra)"
PMI = "A PMI launcher"
"""Another launcher that sets PMI_RANK, or no launcher: the variable may be left over."""

Protocol = Literal["PMIx", "PMI", ""]


class EveryRankError(ConfigError):
    """Wrong input that every rank detects. Only rank 0 reports it."""


@dataclass(frozen=True)
class Launcher:
    """The program that started this process as one of its ranks."""

    name: str
    size: int | None  # number of ranks that it started; None: unknown
    rank: int | None
    protocol: Protocol = ""  # how its ranks find each other; "": they cannot
    is_srun: bool = False

    @property
    def first(self) -> bool:
        """Whether this rank reports errors that all ranks detect."""
        return not self.rank


def find_launcher(env: Mapping[str, str] = os.environ) -> Launcher | None:
    """Find the launcher in an environment; None for a process that was started alone.

    If one launcher started another, as in a Slurm job that calls mpirun, both have set variables. Then the
    inner launcher is returned.
    """

    def number(name: str) -> int | None:
        return whole_number(env.get(name, ""))

    def started(name: str, size: str, rank: str, protocol: Protocol, is_srun: bool = False) -> list[Launcher]:
        return [Launcher(name, number(size), number(rank), protocol, is_srun)] if rank in env else []

    namespace = env.get("PMIX_NAMESPACE", "")
    # The protocol that srun or Flux uses; both support PMIx and PMI.
    protocol: Protocol = "PMIx" if namespace else "PMI" if "PMI_SIZE" in env else ""
    launchers = started(OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMIx")
    if "HYDI_CONTROL_FD" in env or "MPI_LOCALNRANKS" in env:
        launchers += started(HYDRA, "PMI_SIZE", "PMI_RANK" if "PMI_RANK" in env else "PMI_ID", "PMI")
    if launchers:  # if mpiruns are nested, the outer one has one rank, which is the inner mpirun
        return max(launchers, key=lambda launcher: launcher.size or 0)
    launchers += started("Flux", "FLUX_JOB_SIZE", "FLUX_TASK_RANK", protocol)
    if not namespace.startswith("slurm."):
        launchers += started(
            "PRRTE's prun" if namespace.startswith("pr") else "A PMIx launcher", "", "PMIX_RANK", "PMIx"
        )
    if "SLURM_STEP_NUM_TASKS" in env:  # SLURM_PROCID alone is not enough: a batch script has it without srun
        launchers += started("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", protocol, is_srun=True)
    launchers += started(PMI, "PMI_SIZE", "PMI_RANK", "PMI")
    return launchers[0] if launchers else None


def one_of_several(env: Mapping[str, str] = os.environ) -> Launcher | None:
    """Return the launcher, if it started several ranks, or if their number is unknown."""
    launcher = find_launcher(env)
    return None if launcher is None or launcher.size == 1 else launcher


def refuse_copies(command: str, env: Mapping[str, str] = os.environ) -> None:
    """Raise EveryRankError if a launcher started several processes of a command that runs as one process.

    An interactive shell (``srun --pty``) is one process, whatever the number of tasks.
    """
    launcher = find_launcher(env)
    if launcher is None or (launcher.is_srun and "SLURM_PTY_PORT" in env):
        return
    if (launcher.size or 1) > 1:
        raise EveryRankError(
            f"{launcher.name} started {launcher.size} processes of '{command}', which runs as one:"
            " start it once"
        )
