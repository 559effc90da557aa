"""Check that the ranks which a launcher started are one MPI world.

Code that starts MPI, or a program that will start MPI, calls `check_world` first. Under the launcher of
another MPI, each of the N processes is rank 0 of a world of one rank. N runs of one rank would then look like
one run of N ranks.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence

from disagg.errors import ConfigError
from launch.launcher import PMI, EveryRankError, Launcher, Protocol, one_of_several


class WrongLauncher(EveryRankError):
    """The launcher's ranks are not one MPI world. `problem`: the message without the correct command line."""

    def __init__(self, problem: str, advice: str) -> None:
        super().__init__(problem + advice)
        self.problem = problem


def library_title(library: str) -> str:
    """Return the name and version of an MPI library, from the text of `MPI_Get_library_version`."""
    match = re.match(r"(Open MPI|MPICH) (?:Version:)?\s*v?(\S+?),?\s", library)
    return f"{match[1]} {match[2]}" if match else library.strip("\0 \n").split("\n")[0] or "an unnamed MPI"


def understands(library: str, launcher: Launcher) -> bool:
    """Return False if an MPI library cannot connect to the other ranks of this launcher.

    MPI need not have been started.
    """
    if match := re.match(r"Open MPI v(\d+)", library):
        return launcher.protocol == "PMIx" or int(match[1]) < 5
    if (
        library.startswith("MPICH") and "pmix" not in library.lower()
    ):  # MPICH's version text lists its build options
        return launcher.protocol != "PMIx"
    return True


def check_world(
    library: str,
    world: tuple[int, int] | None,
    command: Sequence[str],
    env: Mapping[str, str] = os.environ,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Raise WrongLauncher unless the ranks that the launcher started are one MPI world.

    `library`: the text of `MPI_Get_library_version`. `world`: the size of MPI's world and this process's rank
    in it; None before MPI is started. `command`, `variables`: the mpillm command with its options, and
    environment variables. The error contains a correct command line made of them.
    """
    launcher = one_of_several(env)
    if launcher is None:
        return
    size, rank = world or (1, 0)
    if world is None or launcher.size is None:
        wrong = not understands(library, launcher) or (
            size == 1 and world is not None and rank != (launcher.rank or 0)
        )
    else:
        wrong = size != launcher.size
    if not wrong:
        return
    library_part = f"but the MPI of {sys.executable}, {library_title(library)}, sees a world of {size}"
    if launcher.size is None:
        process = f"this process as rank {launcher.rank}"
        problem = f"{launcher.name} started {process}, {library_part}: the ranks would be separate runs"
    else:
        n = launcher.size
        problem = f"{launcher.name} started {n} ranks, {library_part}: they would be {n} separate runs"
    if launcher.name == PMI:
        problem += "; if none did, PMI_RANK and PMI_SIZE are left over from another program: unset them"
    raise WrongLauncher(
        problem, _advice(launcher, library, command, variables or {}) if launcher.first else ""
    )


def _advice(launcher: Launcher, library: str, command: Sequence[str], variables: Mapping[str, str]) -> str:
    """Return what the user must do, with a correct command line."""
    from launch.find_mpirun import detect

    ranks = str(launcher.size or "N")
    program = [sys.executable, "-m", "mpillm"]
    required: tuple[str, Protocol] = ("pmi2", "PMI") if library.startswith("MPICH") else ("pmix", "PMIx")
    if launcher.is_srun and launcher.protocol != required[1]:
        head = f"this line starts one world, if `srun --mpi=list` has {required[0]}"
        args = ["srun", "-n", ranks, f"--mpi={required[0]}", *program, *command]
    else:
        try:
            detect()
        except ConfigError as error:
            return f"\n  {error}"
        head = (
            "in an allocation (salloc, sbatch) this line starts one world"
            if launcher.is_srun
            else "this line starts one world"
        )
        args = [*program, "mpirun", "-n", ranks, *command]
        head += ", with the number of ranks for N" if launcher.size is None else ""
    prefix = "".join(f"{name}={shlex.quote(value)} " for name, value in variables.items())
    return f"\n  {head}:\n    {prefix}{shlex.join(args)}"
