"""Environment of a started process, and the files that a launcher and its ranks exchange."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from disagg.errors import ConfigError, nearest
from launch.launcher import OPEN_MPI, EveryRankError, find_launcher
from launch.safe_text import whole_number

EXIT_FILE = "MPILLM_EXIT_FILE"
"""Path of the file into which rank 0 writes its exit code. The files below are in the same folder."""

# Rank 0 writes:
_STARTED = "started"
_DIRECTORY = "directory"  # path of the run directory
# The launcher writes:
_SIGNAL = "signal"  # number of the signal that interrupted the launcher, or of a batch system's to a rank
_ABSENT = "absent"  # ranks that have not registered
_LOST = "lost"  # ranks that have exited
_PORTS = "ports"  # ports of the ranks

TTY = "MPILLM_TTY"
"""Set to 1 when the launcher's standard output is a terminal: rank 0 may redraw a line."""

SECRETS = {"api_key": "MPILLM_API_KEY", "kv_secret": "MPILLM_KV_SECRET"}
"""Options whose values are secret, and the variables that replace them."""

LAUNCH_TYPE = "MLPERF_DISAGG_LAUNCH_TYPE"
"""Program that `run-llm-server` starts: worker or leader. Other commands ignore this variable."""

# Variables that a launcher sets for one rank of one job. A process that inherits them would act as that rank.
_JOB = re.compile(
    r"""
      OMPI_(?!MCA_|ALLOW_RUN_AS_ROOT).*
    | PMIX_(?!MCA_).* | PRTE_(?!MCA_).* | PMI_.* | PMI2_.* | HYDI_.* | MPI_LOCAL(NRANKS|RANKID) | MPIEXEC_.* |
    GFORTRAN_UNBUFFERED_PRECONNECTED |
    SLURM_(PROCID|LOCALID|NODEID|GTIDS|TASK_PID|STEPID|STEPMGR|STEP_.*|SRUN_.*|LAUNCH_NODE_IPADDR|MPI_TYPE|PMI.*|CPU_BIND.*|MEM_BIND.*)
    | FLUX_(TASK_.*|JOB_(SIZE|NNODES)) | MPILLM_(EXIT_FILE|TTY|RANK_REGISTRY)
    """,
    re.VERBOSE,
)

# Open MPI's parameters have the same prefix, whether the user or mpirun has set them. mpirun sets these.
_MPIRUN_MCA = re.compile(
    r"""
      OMPI_MCA_(PREFIXES|cpu_type|initial_wdir|num_procs|mpi_ft_enable|mpi_oversubscribe|rmaps_base_oversubscribe|shmem_RUNTIME_QUERY_hint|pmix)
    | OMPI_MCA_(ess|orte)(_.*)?
    | PMIX_MCA_mca_base_component_show_load_errors
    | (PMIX|PRTE)_MCA_(prte|prefix)_.*
    """,
    re.VERBOSE,
)

# An mpirun reads the allocated nodes from these variables.
_ALLOCATION = re.compile(r"(SLURM|PBS|LSB|LSF|FLUX|COBALT|OAR|SGE)_.*|PE_HOSTFILE")

_OPEN_MPI_RANK = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK")


def without_secrets(args: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return a command line without its secret options, and the variables that replace them.

    All users of a machine can read the command lines of its processes. Logs also contain command lines.
    """
    others, variables = list[str](), dict[str, str]()
    remaining = iter(args)
    for arg in remaining:
        name, equals, value = arg.partition("=")
        if name.startswith("--") and (variable := SECRETS.get(name[2:].replace("-", "_"))):
            variables[variable] = value if equals else next(remaining, "")
        else:
            others.append(arg)
    return others, variables


def clean_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Copy `env` for a process that is not a rank of this process's job."""
    clean = {name: value for name, value in env.items() if not _JOB.fullmatch(name)}
    if (
        "SLURM_STEP_ID" in env
    ):  # without SLURM_OVERLAP, a step that the process starts, such as mpirun's, waits for this step's end
        clean.setdefault("SLURM_OVERLAP", "1")
        clean |= _job_allocation(env)
    if not any(name in env for name in _OPEN_MPI_RANK):
        return clean
    clean = {name: value for name, value in clean.items() if not _MPIRUN_MCA.fullmatch(name)}
    prefix = clean.pop("OPAL_PREFIX", None)
    if prefix is not None and "LD_LIBRARY_PATH" in clean:
        folders = [
            folder
            for folder in clean["LD_LIBRARY_PATH"].split(os.pathsep)
            if folder and folder != os.path.join(prefix, "lib")  # noqa: PTH118
        ]
        clean["LD_LIBRARY_PATH"] = os.pathsep.join(folders)
        if not folders:
            del clean["LD_LIBRARY_PATH"]
    return clean


def environment_of_this_node(env: Mapping[str, str]) -> dict[str, str]:
    """Copy `env` as `clean_environment`, for a process whose mpirun must stay on this node."""
    return {name: value for name, value in clean_environment(env).items() if not _ALLOCATION.fullmatch(name)}


def _job_allocation(env: Mapping[str, str]) -> dict[str, str]:
    """Return variables that let an mpirun use all nodes of the job from a step with fewer nodes.

    In a step, the variables have the job's nodes, but only the step's tasks. Open MPI ignores nodes without
    tasks.
    """
    job, step = (whole_number(env.get(f"SLURM_{scope}_NUM_NODES", "")) for scope in ("JOB", "STEP"))
    cpus, each = env.get("SLURM_JOB_CPUS_PER_NODE", ""), whole_number(env.get("SLURM_CPUS_PER_TASK", "1"))
    if job is None or step is None or step >= job or not cpus or each is None:
        return {}
    # Such as "72(x2),36": numbers of CPUs, with the number of consecutive nodes.
    tasks = re.sub(r"\d{1,18}(?![\d)])", lambda match: str(max(1, int(match[0]) // max(1, each))), cpus)
    return {"SLURM_NNODES": str(job), "SLURM_TASKS_PER_NODE": tasks}


def rank_environment(
    env: Mapping[str, str], exit_file: Path, tty: bool, session: str | None = None
) -> dict[str, str]:
    """Return the environment of `mpirun` and of the ranks.

    `session`: parent of Open MPI 5's session folder on this node. The session folder is named after mpirun's
    process id. In `TMPDIR`, the folder of a killed mpirun prevents a later start with the same id.
    """
    ranks = clean_environment(env)
    if session is not None:
        ranks.setdefault("PRTE_MCA_prte_local_tmpdir_base", session)
    ranks[EXIT_FILE] = str(exit_file)
    ranks["PYTHONUNBUFFERED"] = "1"
    if tty:
        ranks[TTY] = "1"
    return ranks


def write_started(env: Mapping[str, str] = os.environ) -> None:
    """Report to the launcher, if there is one, that rank 0 runs and enforces the deadlines. Rank 0 only.

    Raises ConfigError if rank 0 is on a host without access to the launcher's working directory.
    """
    launcher = find_launcher(env)
    if EXIT_FILE not in env or launcher is None or launcher.rank != 0:
        return
    try:
        Path(env[EXIT_FILE]).with_name(_STARTED).touch()
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: {error.strerror}: rank 0 is on a host that does not see this folder of"
            " `mpillm mpirun`; start it in a folder that all hosts share"
        ) from error


def read_started(exit_file: Path) -> bool:
    """Return whether rank 0 has called `write_started`."""
    return exit_file.with_name(_STARTED).exists()


def write_exit_code(code: int, env: Mapping[str, str] = os.environ) -> None:
    """Write rank 0's exit code for the launcher, if there is one.

    `mpirun`'s own status is not reliable after the loss of a rank. Only rank 0 may call this, immediately
    before it exits (or calls `MPI_Abort`). The launcher then ends the other ranks after a grace time. If the
    disk is full, the launcher returns `mpirun`'s status.
    """
    name = env.get(EXIT_FILE)
    if name is None:
        return
    path = Path(name)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        draft.write_text(f"{code}\n", encoding="ascii")
        draft.replace(path)
    except OSError as error:
        print(
            f"mpillm: exit code {code} can't be written: {path}: {error.strerror}",
            file=sys.stderr,
            flush=True,
        )


def read_exit_code(exit_file: Path) -> int | None:
    """Return rank 0's exit code, or None if it has not written one."""
    try:
        return int(exit_file.read_text(encoding="ascii"))
    except FileNotFoundError:
        return None


def write_directory(path: Path, env: Mapping[str, str] = os.environ) -> None:
    """Write the run directory's absolute path for the launcher, if there is a launcher. Rank 0 only."""
    if EXIT_FILE in env:
        with contextlib.suppress(OSError):  # the launcher then cannot complete the run directory
            Path(env[EXIT_FILE]).with_name(_DIRECTORY).write_bytes(os.fsencode(path))


def read_directory(exit_file: Path) -> Path | None:
    """Return the run directory, or None if rank 0 has not written it."""
    try:
        return Path(os.fsdecode(exit_file.with_name(_DIRECTORY).read_bytes()))
    except OSError:
        return None


def let_rank_0_report(env: Mapping[str, str] = os.environ, max_s: float = 5.0) -> None:
    """Wait until rank 0, which may start later, has reported an error that every rank detects.

    Most launchers end all ranks as soon as one fails. Without the wait, rank 0's message can be lost.
    """
    end = time.monotonic() + max_s
    while time.monotonic() < end and not (
        EXIT_FILE in env and read_exit_code(Path(env[EXIT_FILE])) is not None
    ):
        time.sleep(0.05)


def _write_file(exit_file: Path, name: str, text: str) -> None:
    """Write a file beside `exit_file` atomically: a rank may read at any time.

    If the disk is full, or the run has just ended, the file is missing, and only messages lack its content.
    """
    draft = exit_file.with_name(f"{name}.draft")
    with contextlib.suppress(OSError):
        draft.write_text(text, encoding="utf-8")
        draft.replace(exit_file.with_name(name))


def _read_file(env: Mapping[str, str], name: str) -> str:
    """Return the text of a file beside `exit_file`; "" without a launcher, the file, or access to it."""
    try:
        return Path(env[EXIT_FILE]).with_name(name).read_text(encoding="utf-8")
    except (KeyError, OSError):
        return ""


def write_signal(number: int, exit_file: Path) -> None:
    """Write for the ranks which signal the launcher got: mpirun sends them another signal."""
    _write_file(exit_file, _SIGNAL, str(int(number)))


def note_warning(number: int, env: Mapping[str, str] = os.environ) -> None:
    """Write which warning signal of a batch system a rank got, unless the launcher got one.

    The signal also ends Open MPI's daemons, and then this rank before it can report more.
    """
    if EXIT_FILE in env and number in (signal.SIGUSR1, signal.SIGUSR2) and read_signal(env) is None:
        write_signal(number, Path(env[EXIT_FILE]))


def read_signal(env: Mapping[str, str] = os.environ) -> int | None:
    """Return the launcher's signal; None without a signal or a launcher."""
    number = _read_file(env, _SIGNAL)
    return int(number) if number else None


def write_absent(ranks: str, exit_file: Path) -> None:
    """Write for rank 0 which ranks have not registered."""
    _write_file(exit_file, _ABSENT, ranks)


def read_absent(env: Mapping[str, str] = os.environ) -> str:
    """Return the ranks that have not registered; "" if all have, or without a registry."""
    return _read_file(env, _ABSENT)


def write_ports(ports: Sequence[tuple[int, str, str, int, str]], unreachable: str, exit_file: Path) -> None:
    """Write for rank 0 a `Port` of each rank, and the ranks that the launcher cannot reach."""
    _write_file(exit_file, _PORTS, json.dumps([ports, unreachable]))


def read_ports(env: Mapping[str, str] = os.environ) -> tuple[list[tuple[int, str, str, int, str]], str]:
    """Return the values that `write_ports` has written; empty without a launcher."""
    ports, unreachable = json.loads(_read_file(env, _PORTS) or '[[], ""]')
    return [(rank, host, address, port, own) for rank, host, address, port, own in ports], unreachable


def write_lost(ranks: Iterable[int], exit_file: Path) -> None:
    """Write for rank 0 which ranks exited before all had joined."""
    _write_file(exit_file, _LOST, " ".join(map(str, ranks)))


def read_lost(env: Mapping[str, str] = os.environ) -> list[int]:
    """Return the ranks that exited before all had joined, as far as the launcher has noticed."""
    return [int(n) for n in _read_file(env, _LOST).split()]


def mpirun_ends_ranks(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether this is a rank of Open MPI's mpirun, started without `mpillm mpirun`.

    On Ctrl-C, such an mpirun sends its ranks SIGTERM, drops their output from then on, and kills them half a
    second later.
    """
    launcher = find_launcher(env)
    return launcher is not None and launcher.name == OPEN_MPI and EXIT_FILE not in env


def launch_type() -> str | None:
    """Read `LAUNCH_TYPE`: worker or leader, None if it is not set.

    Raises EveryRankError for any other value.
    """
    value = os.environ.get(LAUNCH_TYPE, "")
    kind = value.lower()
    if kind not in ("", "worker", "leader"):
        raise EveryRankError(
            f"environment variable {LAUNCH_TYPE}={value}: not worker or leader"
            + nearest(kind, ("worker", "leader"))
        )
    return kind or None


def drop_launch_type(command: str) -> None:
    """Unset `LAUNCH_TYPE`, so that no child reports it again. Rank 0 prints that `command` ignores it."""
    kind = os.environ.pop(LAUNCH_TYPE, None)
    launcher = find_launcher()
    if kind and (launcher is None or launcher.first):
        print(
            f"mpillm: note: the environment variable {LAUNCH_TYPE}={kind} has no effect on {command}:"
            " only run-llm-server reads it, for the servers of a disaggregation YAML",
            file=sys.stderr,
            flush=True,
        )
