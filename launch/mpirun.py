"""``python -m mpillm mpirun -n N [mpirun options] COMMAND``: print and run the right `mpirun` line.

Additions to a plain `mpirun`:

- It sets options for root, for more ranks than CPU cores, and for binding (see `command_line`).
- A lost rank does not end the other ranks before rank 0 has named it.
- If mpirun does not start rank 0 within a deadline, mpirun is ended.
- The exit code is the code that rank 0 wrote (`launch.environment.write_exit_code`), even if `mpirun`
  reports another code for a killed rank.
- If rank 0 cannot report why a run ended, this process reports it (`launch.launcher_monitor`).
- The first Ctrl-C makes the ranks stop. Processes that still run after a grace time are killed. No process is
  left on this node.
"""

from __future__ import annotations

import math
import os
import resource
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from launch import run_folders
from launch.command import wrapped
from launch.environment import (
    EXIT_FILE,
    LAUNCH_TYPE,
    SECRETS,
    TTY,
    rank_environment,
    read_directory,
    read_exit_code,
    read_signal,
    read_started,
    without_secrets,
    write_absent,
    write_lost,
    write_ports,
    write_signal,
)
from launch.exits import RankExit, how_ended, sentence
from launch.find_mpirun import Mpi, detect
from launch.launcher import RANK_COMMANDS
from launch.launcher_monitor import Cause, LauncherMonitor
from launch.masking import MASK, masked_args
from launch.mpi_ports import unreachable_ranks
from launch.mpirun_args import PLACEMENT, USAGE, has_option, parse_arguments, spans_hosts
from launch.own_messages import FAILED
from launch.rank_registry import REGISTRY_ADDRESS, RankRegistry
from launch.safe_text import whole_number
from launch.signals import title
from launch.supervisor import START_DEADLINE_S, STOP_GRACE_S, Supervisor, print_message

# Commands that write no exit code. For them, mpirun ends all ranks when one rank fails.
_END_WITH_MPIRUN = ("generate-disagg-config", "run-llm-server")

# Open files that an mpirun needs: with 64, Open MPI's mpirun can start 8 ranks, but not with 52.
_FILES, _FILES_OF_A_RANK = 32, 8

_MPI_STARTS_S = 5.0  # after all ranks have registered, MPI usually starts sooner

NOT_READY = 3
"""Exit code for a run whose rank 0 was never started."""

INSTANCE_LOST = 5
"""Exit code for a run that lost a rank, or that ended without an exit code."""

Amend = Callable[[Path, Cause | None, int], tuple[str, int]]
"""Completes a run directory: its files name the cause, and it has an HTML report.

Receives the directory, the cause (None: rank 0 has written it) and the exit code. Returns the text for the
user, and the exit code: 0 if the run was complete."""


def command_line(
    mpi: Mpi,
    ranks: int,
    program: Sequence[str],
    options: Sequence[str] = (),
    *,
    root: bool = False,
    cores: int = 1,
    exports: Sequence[str] = (),
    survive: bool = True,
) -> list[str]:
    """Return the `mpirun` line that starts `program` on `ranks` ranks."""
    line = [mpi.mpirun, "-n", str(ranks)]
    if mpi.kind == "openmpi":
        if root and not has_option(options, {"allow-run-as-root"}):
            line.append("--allow-run-as-root")
        if ranks > cores and not has_option(options, PLACEMENT):
            line.append("--oversubscribe")
        if not has_option(options, {"bind-to", "cpu-set", "cpu-list"}):
            line += ["--bind-to", "none"]
        if not has_option(options, {"stdin"}):
            line += ["--stdin", "none"]
        if survive and mpi.version >= (5,):
            if not has_option(options, {"with-ft"}):
                line += ["--with-ft", "ulfm"]
            line += ["--prtemca", "state_base_error_non_zero_exit", "0"]
        elif survive:
            line += ["--enable-recovery", "--mca", "orte_abort_on_non_zero_status", "0"]
        for name in exports:
            line += ["-x", name]
        return [*line, *options, *program]
    if survive:
        guard = Path(__file__).with_name("guard.py")
        return [*line, "-disable-auto-cleanup", *options, sys.executable, "-I", "-S", str(guard), *program]
    return [*line, *options, *program]


def on_this_host(mpi: Mpi, env: Mapping[str, str] = os.environ) -> list[str]:
    """Return the options that keep all ranks on this host in a Slurm job.

    Without these options, `mpirun` starts ranks through srun on all nodes of the allocation, at most one per
    task.
    """
    if "SLURM_JOB_ID" not in env:
        return []
    if mpi.kind == "openmpi":
        parameter = "--prtemca" if mpi.version >= (5,) else "--mca"
        return [parameter, "ras", "^slurm", parameter, "plm", "^slurm"]
    return ["-rmk", "user", "-launcher", "fork"]


def usable_cores() -> int:
    """Return the number of physical CPU cores that this process may use. Open MPI calls them slots."""
    physical = psutil.cpu_count(logical=False) or 1
    if sys.platform == "linux":
        return min(physical, len(os.sched_getaffinity(0)))
    return physical


def slots(env: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks that Open MPI starts without --oversubscribe.

    In a Slurm job, Open MPI also limits this number to the number of tasks.
    """
    tasks = whole_number(env.get("SLURM_NTASKS", ""))
    return usable_cores() if tasks is None else min(usable_cores(), tasks)


def exit_code(
    rank0_code: int | None, status: int, interrupted: int | None = None, survive: bool = True
) -> int:
    """Return the launcher's exit code.

    If `mpirun` has the options that let ranks survive, it exits with 0 even after a loss. Then 0 is not a
    success unless rank 0 wrote an exit code.

    Args:
        rank0_code: the exit code that rank 0 wrote.
        status: `mpirun`'s exit code; negative: a signal.
        interrupted: the signal that the user sent.
        survive: whether `mpirun` has the options that let ranks survive the loss of others.
    """
    if rank0_code is not None:
        return rank0_code
    if interrupted is not None:
        return 128 + interrupted
    if not survive:
        return status if status >= 0 else 128 - status
    killed = 128 + signal.SIGKILL
    if (
        status <= 0 or status & killed == killed or status == 128 + signal.SIGTERM
    ):  # Hydra's status is the bitwise OR of all ranks' statuses
        return INSTANCE_LOST
    return status


def _exports(env: Mapping[str, str]) -> list[str]:
    """Return the variables that ranks on other hosts need."""
    return [
        EXIT_FILE,
        "PYTHONUNBUFFERED",
        *([TTY] if sys.stdout.isatty() else []),
        *(name for name in (LAUNCH_TYPE, *SECRETS.values()) if name in env),
    ]


def _open_registry(ranks: int) -> RankRegistry | None:
    """Open the rank registry. If no port can be opened, print a message and return None."""
    try:
        return RankRegistry(ranks)
    except OSError as error:
        print_message(
            f"no port can be opened ({error.strerror or error}): only mpirun may name a rank that is lost on"
            " another host before MPI has started"
        )
        return None


class _RegistryFiles:
    """Writes files for rank 0 with the registered ranks, and the hosts that this host cannot reach."""

    def __init__(self, registry: RankRegistry, exit_file: Path) -> None:
        self._registry, self._exit_file = registry, exit_file
        self._written: tuple[str, list[int]] = ("", [])
        self._probe_at: float | None = None  # None until all ranks have registered; inf: the probe is done

    def update(self) -> str:
        """Write the files; return the lost ranks whose loss keeps MPI from starting. Call this often."""
        registry, exit_file = self._registry, self._exit_file
        absent, lost = registry.absent(), sorted(one.rank for one in registry.first_exits())
        if absent != self._written[0]:
            write_absent(absent, exit_file)
        if lost != self._written[1]:
            write_lost(lost, exit_file)
        self._written = absent, lost
        if self._probe_at is None and (ports := registry.ports()):
            self._probe_at = time.monotonic() + _MPI_STARTS_S
            write_ports(ports, "", exit_file)
        elif self._probe_at is not None and time.monotonic() > self._probe_at:
            self._probe_at = math.inf
            if registry.waits():
                threading.Thread(target=self._probe, daemon=True).start()
        return sentence(registry.lost())

    def _probe(self) -> None:
        ports = self._registry.ports()
        if unreachable := unreachable_ranks(ports, socket.gethostname()):
            write_ports(ports, unreachable, self._exit_file)


def main(
    argv: list[str],
    commands: Sequence[str] = RANK_COMMANDS,
    program: Sequence[str] | None = None,
    stop_grace_s: float = STOP_GRACE_S,
    amend: Amend = lambda directory, cause, code: (cause.text if cause else "", code),
    mpi: Mpi | None = None,
) -> int:
    """Print and run the `mpirun` line for `argv`; return the exit code.

    Args:
        argv: arguments of ``mpillm mpirun``.
        commands: the commands that may run on ranks.
        program: the program of each rank, to which the command is appended; by default ``python -m mpillm``.
        stop_grace_s: time that ranks have to exit by themselves.
        amend: completes the run directory after the loss of rank 0.
        mpi: by default, the installation of this Python's mpi4py.
    """
    head = argv[: next((i for i, arg in enumerate(argv) if arg in commands or arg == "--"), len(argv))]
    if "-h" in head or "--help" in head:
        print(USAGE.format(commands=", ".join(commands), start=START_DEADLINE_S))
        return 0
    arguments = parse_arguments(argv, commands)
    command, secrets = without_secrets(arguments.command)
    environment = os.environ | secrets
    mpi = mpi or detect()
    several_hosts = spans_hosts(arguments.options, os.environ)
    n_here = min(arguments.ranks, slots()) if several_hosts else arguments.ranks
    survive = arguments.command[0] not in _END_WITH_MPIRUN
    registers = several_hosts and survive
    registry = _open_registry(arguments.ranks) if registers and not arguments.dry_run else None
    registers = registers and (registry is not None or arguments.dry_run)
    line = command_line(
        mpi,
        arguments.ranks,
        [*([sys.executable, "-m", "mpillm"] if program is None else program), *command],
        arguments.options,
        root=os.geteuid() == 0,
        cores=slots(),
        exports=[*_exports(environment), *([REGISTRY_ADDRESS] if registers else [])] if several_hosts else [],
        survive=survive,
    )
    safe_line = masked_args(line)
    if arguments.dry_run:
        # A shell needs one line: eval "$(…)".
        print(wrapped(map(shlex.quote, safe_line)) if sys.stdout.isatty() else shlex.join(safe_line))
        for name in secrets:
            print_message(f"the line has no secret: set {name} in its environment")
        if safe_line != line:
            print_message(f"the line has {MASK} in place of each secret: fill it in")
        return 0
    print(wrapped(map(shlex.quote, safe_line)), file=sys.stderr, flush=True)
    # Rank 0 may be on another host, so its files are in the working directory, which the hosts share.
    with (
        run_folders.temporary() as session,
        run_folders.temporary(Path.cwd() if several_hosts else None) as folder,
    ):
        exit_file = Path(folder) / "exit_code"
        env = rank_environment(environment, exit_file, tty=sys.stdout.isatty(), session=session)
        if registry is not None:
            env[REGISTRY_ADDRESS] = registry.address
        monitor = LauncherMonitor(registry)
        supervisor = Supervisor(
            openmpi=mpi.kind == "openmpi",
            stop_grace_s=stop_grace_s,
            start_deadline_s=arguments.start_deadline_s,
            drains=arguments.command[0] == "serve",
            draws=sys.stdout.isatty(),
            monitor=monitor if several_hosts else None,
        )
        status, interrupted = supervisor.run(
            line,
            env,
            lambda: read_started(exit_file),
            lambda: read_exit_code(exit_file) is not None,
            lambda number: write_signal(number, exit_file),
            _RegistryFiles(registry, exit_file).update if registry is not None else lambda: "",
        )
        is_reported = interrupted is not None  # by the supervisor
        if not is_reported:  # a batch system's signal reaches the ranks and mpirun's daemons, which it ends
            interrupted = read_signal(env)
        rank0_code = read_exit_code(exit_file)
        started = read_started(exit_file)
        without_ranks = _without_ranks(n_here, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        if rank0_code is None and supervisor.never_started:
            rank0_code = NOT_READY
        lost = supervisor.lost or sentence(registry.first_exits() if registry is not None else ())
        if rank0_code is None and interrupted is None and lost:
            text = f"MPI can't start: {lost}"
            print(f"{FAILED}in phase 'join'\n  {text}", file=sys.stderr, flush=True)
            rank0_code = INSTANCE_LOST
        if rank0_code is None and interrupted is None and not started and not supervisor.killed:
            why = f"it has no daemon on {monitor.host}" if monitor.host else without_ranks
            print_message(f"mpirun ended with {status} before rank 0 had started: {why}")
            rank0_code = NOT_READY
        directory = read_directory(exit_file)
        code, cause = exit_code(rank0_code, status, interrupted, survive), None
        if rank0_code is None and survive and directory is None and INSTANCE_LOST < code < 128:
            print_message(f"mpirun ended with {status} before the ranks had joined: {without_ranks}")
            rank0_code = code = NOT_READY
        if survive and interrupted is None and (started or supervisor.killed):
            if cause := _why(monitor, supervisor, rank0_code, code, status):
                code = INSTANCE_LOST
            elif rank0_code == 0 and supervisor.killed:  # rank 0's output may also be lost
                where = f": see {directory / 'result.json'}" if directory is not None else ""
                print_message(f"{_killed(supervisor)}; the run had ended by then{where}")
        elif rank0_code is None and interrupted is not None:
            cause = Cause(f"interrupted ({title(interrupted)})")
    text = cause.text if cause else ""
    silent = several_hosts and code != 0 and not is_reported and not monitor.failure_is_printed
    if directory is not None and directory.is_dir() and (cause or silent):
        text, code = amend(directory, cause, code)
    if text:
        print_message(text)
    return code


def _without_ranks(n_ranks: int, limit: int) -> str:
    """Return the likely cause if an mpirun has not started `n_ranks` ranks here, with `limit` open files.

    If Open MPI's mpirun cannot open a pipe, it may print "Unknown error", or nothing.
    """
    need = _FILES + n_ranks * _FILES_OF_A_RANK
    if limit == resource.RLIM_INFINITY or limit >= need:
        return f"see its output; if there is none: `python -m mpillm mpirun -n {n_ranks} doctor`"
    return (
        f"a process here may open {limit} files, and mpirun needs up to {need} for {n_ranks} ranks:"
        f" ulimit -n {need}, or more; if that does not help, see its output"
    )


def _why(
    monitor: LauncherMonitor, supervisor: Supervisor, rank0_code: int | None, code: int, status: int
) -> Cause | None:
    """Return why a run ended, if this process has detected the cause; None if rank 0 has reported it.

    `code`: the exit code of the launcher if rank 0 has reported the cause.
    """
    if rank0_code != 0:
        if text := monitor.lost_openmpi_daemon(supervisor.finished_at):
            return Cause(text)
        # An mpirun that writes to an exited daemon gets SIGPIPE. Rank 0 may have reported an earlier exit.
        after_others = rank0_code is not None and supervisor.killed == signal.SIGPIPE
        if supervisor.killed and supervisor.finished_at == math.inf and not after_others:
            return Cause(_killed(supervisor))
    if code != INSTANCE_LOST or (rank0_code is not None and monitor.failure_is_printed):
        return None
    # Rank 0 writes its exit code before its message, and may have been killed between the two.
    if text := monitor.exits_before_rank_0(status):
        return Cause(text)
    if rank0_code is not None:
        return None
    # 0 and SIGPIPE, from writing to an exited rank, also follow a killed rank.
    how = f" (mpirun ended with {status})" if status not in (0, 128 + signal.SIGPIPE) else ""
    rank0 = RankExit(0, monitor.hosts().get(0, ""), how="ended without an exit code")
    return Cause(f"{sentence([rank0])}: it was killed or crashed{how}", 0)


def _killed(supervisor: Supervisor) -> str:
    return f"mpirun (pid {supervisor.pid}) {how_ended(-supervisor.killed)}, and so were all ranks"
