"""``python -m mpillm mpirun -n N [mpirun options] COMMAND``: print and run the right `mpirun` line.

Additions to a plain `mpirun`:

- It sets options for root, more ranks than CPU cores, and binding (see `command_line`).
- A lost rank does not end the others before rank 0 has named it.
- If mpirun does not start rank 0 within a deadline, it is ended.
- The exit code is the code that rank 0 wrote (`launch.environment.tell_exit_code`), even if `mpirun` reports
  another code for a killed rank.
- If rank 0 cannot report why a run ended, this process does (`launch.witness`).
- The first Ctrl-C makes the ranks stop. Processes that still run after a grace time are killed. No process is
  left on this node.
"""

from __future__ import annotations

import contextlib
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
    tell_absent,
    tell_lost,
    tell_ports,
    tell_signal,
    told_directory,
    told_exit_code,
    told_started,
    without_secrets,
)
from launch.exits import RankExit, how_ended, sentence
from launch.find_mpirun import Mpi, detect
from launch.launcher import RANK_COMMANDS
from launch.masking import MASK, masked_words
from launch.mpi_ports import unreached_ranks
from launch.mpirun_words import PLACEMENT, USAGE, has_option, parse_arguments, spans_hosts
from launch.outside import whole_number
from launch.own_messages import FAILED
from launch.roll_call import ROLL_CALL, RollCall
from launch.signals import title
from launch.supervisor import START_DEADLINE_S, STOP_GRACE_S, Supervisor, say
from launch.witness import Cause, Witness

# Commands that tell no exit code: mpirun ends all ranks when one fails.
_END_WITH_MPIRUN = ("generate-disagg-config", "run-llm-server")

_FILES, _FILES_OF_A_RANK = 32, 8  # open in an mpirun: Open MPI's starts 8 ranks with 64, not with 52

_MPI_STARTS_S = 5.0  # usually less, once all ranks are there

NOT_READY = 3
"""Exit code for a run whose rank 0 was never started."""

INSTANCE_LOST = 5
"""Exit code for a run that lost a rank, and for one that ended without telling a code."""

Amend = Callable[[Path, Cause | None, int], tuple[str, int]]
"""Gets a run directory, why the run ended (None: rank 0 has written that) and the exit code.

It sees that the directory's files say so, and that there is a page. Returns what to tell the person,
and the exit code: 0 if the run had ended well."""


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
    """Return the `mpirun` line that starts `program` on `ranks` ranks; a pure function."""
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

    Without them `mpirun` would start ranks through srun, on all nodes of the allocation, and no more than
    that has tasks.
    """
    if "SLURM_JOB_ID" not in env:
        return []
    if mpi.kind == "openmpi":
        parameter = "--prtemca" if mpi.version >= (5,) else "--mca"
        return [parameter, "ras", "^slurm", parameter, "plm", "^slurm"]
    return ["-rmk", "user", "-launcher", "fork"]


def usable_cores() -> int:
    """Return the number of cores as Open MPI counts slots (physical ones), and no more than this process may
    use."""
    physical = psutil.cpu_count(logical=False) or 1
    if sys.platform == "linux":
        return min(physical, len(os.sched_getaffinity(0)))
    return physical


def slots(env: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks that Open MPI starts without --oversubscribe: in a Slurm job, of its
    tasks."""
    tasks = whole_number(env.get("SLURM_NTASKS", ""))
    return usable_cores() if tasks is None else min(usable_cores(), tasks)


def exit_code(told: int | None, status: int, interrupted: int | None = None, survive: bool = True) -> int:
    """Return the launcher's exit code.

    `told` is what rank 0 left, `status` is how `mpirun` ended (negative: by a signal), `interrupted` the
    signal that the user sent. With the options that let ranks survive (`survive`), `mpirun` ends with 0 after
    any loss: then 0 without a told code is no success.
    """
    if told is not None:
        return told
    if interrupted is not None:
        return 128 + interrupted
    if not survive:
        return status if status >= 0 else 128 - status
    killed = 128 + signal.SIGKILL
    if (
        status <= 0 or status & killed == killed or status == 128 + signal.SIGTERM
    ):  # hydra joins the statuses of all ranks by OR
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


def _call_the_roll(ranks: int) -> RollCall | None:
    """Open the roll call; return None, and say so once, if no port can be opened for it."""
    try:
        return RollCall(ranks)
    except OSError as error:
        say(
            f"no port can be opened ({error.strerror or error}): who is lost on another host before MPI has"
            " started may be told by mpirun only"
        )
        return None


class _Heard:
    """Writes files for rank 0 with the registered ranks, and the hosts that this host cannot reach."""

    def __init__(self, roll_call: RollCall, exit_file: Path) -> None:
        self._roll_call, self._exit_file = roll_call, exit_file
        self._told: tuple[str, list[int]] = ("", [])
        self._probe_at: float | None = None  # once all are there; inf: it is done

    def lost(self) -> str:
        """Name the ranks without which MPI can't start; call it often."""
        roll_call, exit_file = self._roll_call, self._exit_file
        absent, ended = roll_call.absent(), sorted(one.rank for one in roll_call.first())
        if absent != self._told[0]:
            tell_absent(absent, exit_file)
        if ended != self._told[1]:
            tell_lost(ended, exit_file)
        self._told = absent, ended
        if self._probe_at is None and (ports := roll_call.ports()):
            self._probe_at = time.monotonic() + _MPI_STARTS_S
            tell_ports(ports, "", exit_file)
        elif self._probe_at is not None and time.monotonic() > self._probe_at:
            self._probe_at = math.inf
            if roll_call.waits():
                threading.Thread(target=self._probe, daemon=True).start()
        return sentence(roll_call.lost())

    def _probe(self) -> None:
        ports = self._roll_call.ports()
        if beyond := unreached_ranks(ports, socket.gethostname()):
            with contextlib.suppress(OSError):  # the run has just ended, and its folder is gone
                tell_ports(ports, beyond, self._exit_file)


def main(
    argv: list[str],
    commands: Sequence[str] = RANK_COMMANDS,
    program: Sequence[str] | None = None,
    stop_grace_s: float = STOP_GRACE_S,
    amend: Amend = lambda directory, cause, code: (cause.text if cause else "", code),
    mpi: Mpi | None = None,
) -> int:
    """Print and start the `mpirun` line for `argv` and see it to its end. Returns the exit code.

    `program` is what each rank runs before the command's words: this Python with ``-m mpillm`` unless given.
    `mpi` is by default the one of this Python's mpi4py.
    """
    head = argv[: next((i for i, word in enumerate(argv) if word in commands or word == "--"), len(argv))]
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
    calls = several_hosts and survive
    roll_call = _call_the_roll(arguments.ranks) if calls and not arguments.dry_run else None
    calls = calls and (roll_call is not None or arguments.dry_run)
    line = command_line(
        mpi,
        arguments.ranks,
        [*([sys.executable, "-m", "mpillm"] if program is None else program), *command],
        arguments.options,
        root=os.geteuid() == 0,
        cores=slots(),
        exports=[*_exports(environment), *([ROLL_CALL] if calls else [])] if several_hosts else [],
        survive=survive,
    )
    shown = masked_words(line)
    if arguments.dry_run:
        # One line for a shell that reads it: eval "$(…)".
        print(wrapped(map(shlex.quote, shown)) if sys.stdout.isatty() else shlex.join(shown))
        for name in secrets:
            say(f"the line has no secret: set {name} in its environment")
        if shown != line:
            say(f"the line has {MASK} in place of each secret: fill it in")
        return 0
    print(wrapped(map(shlex.quote, shown)), file=sys.stderr, flush=True)
    # Rank 0 may be on another host: then the file has to be in a folder that the hosts share, as the working
    # directory is.
    with (
        run_folders.temporary() as session,
        run_folders.temporary(Path.cwd() if several_hosts else None) as folder,
    ):
        exit_file = Path(folder) / "exit_code"
        env = rank_environment(environment, exit_file, tty=sys.stdout.isatty(), session=session)
        if roll_call is not None:
            env[ROLL_CALL] = roll_call.address
        witness = Witness(roll_call)
        supervisor = Supervisor(
            openmpi=mpi.kind == "openmpi",
            stop_grace_s=stop_grace_s,
            start_deadline_s=arguments.start_deadline_s,
            drains=arguments.command[0] == "serve",
            draws=sys.stdout.isatty(),
            witness=witness if several_hosts else None,
        )
        status, interrupted = supervisor.run(
            line,
            env,
            lambda: told_started(exit_file),
            lambda: told_exit_code(exit_file) is not None,
            lambda number: tell_signal(number, exit_file),
            _Heard(roll_call, exit_file).lost if roll_call is not None else lambda: "",
        )
        told = told_exit_code(exit_file)
        started = told_started(exit_file)
        if told is None and supervisor.never_started:
            told = NOT_READY
        lost = supervisor.lost or sentence(roll_call.first() if roll_call is not None else ())
        if told is None and interrupted is None and lost:
            text = f"MPI can't start: {lost}"
            print(f"{FAILED}in phase 'join'\n  {text}", file=sys.stderr, flush=True)
            told = INSTANCE_LOST
        if told is None and interrupted is None and not started and not supervisor.killed:
            why = f"it has no daemon on {witness.host}" if witness.host else _without_ranks(n_here)
            say(f"mpirun ended with {status} before rank 0 had started: {why}")
            told = NOT_READY
        directory = told_directory(exit_file)
        code, cause = exit_code(told, status, interrupted, survive), None
        if told is None and survive and directory is None and INSTANCE_LOST < code < 128:
            say(f"mpirun ended with {status} before the ranks had joined: {_without_ranks(n_here)}")
            told = code = NOT_READY
        if survive and interrupted is None and (started or supervisor.killed):
            if cause := _why(witness, supervisor, told, code, status):
                code = INSTANCE_LOST
            elif told == 0 and supervisor.killed:  # and what rank 0 printed may be lost with it
                where = f": see {directory / 'result.json'}" if directory is not None else ""
                say(f"{_killed(supervisor)}; the run had ended by then{where}")
        elif told is None and interrupted is not None:
            cause = Cause(f"interrupted ({title(interrupted)})")
    text = cause.text if cause else ""
    silent = several_hosts and code != 0 and interrupted is None and not witness.told_person
    if directory is not None and directory.is_dir() and (cause or silent):
        text, code = amend(directory, cause, code)
    if text:
        say(text)
    return code


def _without_ranks(n_ranks: int) -> str:
    """Return the likely cause where an mpirun did not start `n_ranks` ranks on this host.

    Open MPI's may print "Unknown error", or nothing, where it can open no more pipes.
    """
    limit, need = resource.getrlimit(resource.RLIMIT_NOFILE)[0], _FILES + n_ranks * _FILES_OF_A_RANK
    if limit == resource.RLIM_INFINITY or limit >= need:
        return (
            f"what it printed says why; if it printed nothing: `python -m mpillm mpirun -n {n_ranks} doctor`"
        )
    return (
        f"a process here may open {limit} files, and mpirun needs up to {need} for {n_ranks} ranks:"
        f" ulimit -n {need}, or more; if that is no cure, what it printed says why"
    )


def _why(witness: Witness, supervisor: Supervisor, told: int | None, code: int, status: int) -> Cause | None:
    """Return why a run ended that rank 0 could not explain: what this process saw itself.

    None if rank 0 could. `code`: the exit code to be, if so.
    """
    if told != 0:
        if text := witness.lost_by_open_mpi(supervisor.told_at):
            return Cause(text)
        # An mpirun that writes to a daemon which has ended goes the same way: rank 0 may know who was first.
        after_others = told is not None and supervisor.killed == signal.SIGPIPE
        if supervisor.killed and supervisor.told_at == math.inf and not after_others:
            return Cause(_killed(supervisor))
    if code != INSTANCE_LOST or (told is not None and witness.told_person):
        return None
    # Rank 0 may have been killed between its exit code, which it tells first, and its message.
    if text := witness.before_rank_0(status):
        return Cause(text)
    if told is not None:
        return None
    how = f" (mpirun ended with {status})" if status else ""  # 0 says nothing of a rank that was killed
    rank0 = RankExit(0, witness.hosts().get(0, ""), how="ended without an exit code")
    return Cause(f"{sentence([rank0])}: it was killed or crashed{how}", 0)


def _killed(supervisor: Supervisor) -> str:
    return f"mpirun (pid {supervisor.pid}) {how_ended(-supervisor.killed)}, and so were all ranks"
