"""Environment of a started process, and the values and files that a launcher and its ranks exchange."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from disagg.errors import ConfigError, nearest
from launch.launcher import OPEN_MPI, EveryRankError, find_launcher
from launch.outside import whole_number

EXIT_FILE = "MPILLM_EXIT_FILE"
"""Path of the file in which rank 0 leaves its exit code for the launcher.

Beside it, rank 0 leaves `_STARTED` when it begins, and the launcher, in `_SIGNAL`, the number of the signal
that interrupted it, in `_ABSENT`, which ranks have not answered its roll call, in `_PORTS`, where they
listen, and in `_LOST`, which have ended. In `_DIRECTORY` rank 0 leaves the path of the run directory.
"""

_STARTED = "started"
_SIGNAL = "signal"
_ABSENT = "absent"
_LOST = "lost"
_PORTS = "ports"
_DIRECTORY = "directory"

TTY = "MPILLM_TTY"
"""Set to 1 when the launcher's standard output is a terminal: rank 0 may redraw a line."""

SECRETS = {"api_key": "MPILLM_API_KEY", "kv_secret": "MPILLM_KV_SECRET"}
"""Options that nobody but the ranks should read, and the variables in their place."""

LAUNCH_TYPE = "MLPERF_DISAGG_LAUNCH_TYPE"
"""The part of disaggregated serving that `run-llm-server` starts: worker or leader. Only it reads this."""

_RANK_0_S = 5.0  # rank 0 may have started that much later than another rank

# What a launcher sets for one rank of one job. A process that inherits these takes itself for that rank.
_JOB = re.compile(
    r"""
      OMPI_(?!MCA_|ALLOW_RUN_AS_ROOT).*
    | PMIX_(?!MCA_).* | PRTE_(?!MCA_).* | PMI_.* | PMI2_.* | HYDI_.* | MPI_LOCAL(NRANKS|RANKID) | MPIEXEC_.* |
    GFORTRAN_UNBUFFERED_PRECONNECTED |
    SLURM_(PROCID|LOCALID|NODEID|GTIDS|TASK_PID|STEPID|STEPMGR|STEP_.*|SRUN_.*|LAUNCH_NODE_IPADDR|MPI_TYPE|PMI.*|CPU_BIND.*|MEM_BIND.*)
    | FLUX_(TASK_.*|JOB_(SIZE|NNODES)) | MPILLM_(EXIT_FILE|TTY|ROLL_CALL)
    """,
    re.VERBOSE,
)

# Open MPI's parameters travel under one prefix, whether a person or mpirun set them. These are the ones that
# mpirun sets by itself.
_MPIRUN_MCA = re.compile(
    r"""
      OMPI_MCA_(PREFIXES|cpu_type|initial_wdir|num_procs|mpi_ft_enable|mpi_oversubscribe|rmaps_base_oversubscribe|shmem_RUNTIME_QUERY_hint|pmix)
    | OMPI_MCA_(ess|orte)(_.*)?
    | PMIX_MCA_mca_base_component_show_load_errors
    | (PMIX|PRTE)_MCA_(prte|prefix)_.*
    """,
    re.VERBOSE,
)

# By these an mpirun finds the nodes that a scheduler has given.
_ALLOCATION = re.compile(r"(SLURM|PBS|LSB|LSF|FLUX|COBALT|OAR|SGE)_.*|PE_HOSTFILE")

_OPEN_MPI_RANK = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK")


def without_secrets(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return a command line without its options that are secrets, and the variables that say the same.

    Every user of a machine sees the command lines of its processes, and logs have them.
    """
    left, variables = list[str](), dict[str, str]()
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name.startswith("--") and (variable := SECRETS.get(name[2:].replace("-", "_"))):
            variables[variable] = value if equals else next(rest, "")
        else:
            left.append(word)
    return left, variables


def clean_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Copy `env` for a process that is not a rank of the job that this process may be a rank of."""
    clean = {name: value for name, value in env.items() if not _JOB.fullmatch(name)}
    if "SLURM_STEP_ID" in env:  # a step that it starts, as mpirun does, would wait for the end of this one
        clean.setdefault("SLURM_OVERLAP", "1")
        clean |= _whole_allocation(env)
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
    """Copy `env` as `clean_environment`, for a process whose mpirun, if it starts one, stays on this node."""
    return {name: value for name, value in clean_environment(env).items() if not _ALLOCATION.fullmatch(name)}


def _whole_allocation(env: Mapping[str, str]) -> dict[str, str]:
    """Return variables by which an mpirun in a step of fewer nodes than the job's sees all of them.

    Those of the step name the job's nodes, but the step's tasks: Open MPI takes nodes without one for none.
    """
    job, step = (whole_number(env.get(f"SLURM_{what}_NUM_NODES", "")) for what in ("JOB", "STEP"))
    cpus, each = env.get("SLURM_JOB_CPUS_PER_NODE", ""), whole_number(env.get("SLURM_CPUS_PER_TASK", "1"))
    if job is None or step is None or step >= job or not cpus or each is None:
        return {}
    # As "72(x2),36": numbers of CPUs, and of nodes in a row.
    tasks = re.sub(r"\d{1,18}(?![\d)])", lambda found: str(max(1, int(found[0]) // max(1, each))), cpus)
    return {"SLURM_NNODES": str(job), "SLURM_TASKS_PER_NODE": tasks}


def rank_environment(
    env: Mapping[str, str], exit_file: Path, tty: bool, session: str | None = None
) -> dict[str, str]:
    """Return the environment of `mpirun` and, through it, of the ranks.

    `session`: a folder on this node for Open MPI 5's session folder, which is named after mpirun's process
    id. Beside others in `TMPDIR`, one that a killed mpirun left keeps a later one with the same id from
    starting.
    """
    ranks = clean_environment(env)
    if session is not None:
        ranks.setdefault("PRTE_MCA_prte_local_tmpdir_base", session)
    ranks[EXIT_FILE] = str(exit_file)
    ranks["PYTHONUNBUFFERED"] = "1"
    if tty:
        ranks[TTY] = "1"
    return ranks


def tell_started(env: Mapping[str, str] = os.environ) -> None:
    """Tell the launcher, if it asked, that rank 0 runs and keeps the deadlines from here on. Rank 0 only.

    Raises ConfigError if rank 0 is on another host, which does not see the launcher's working directory.
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


def told_started(exit_file: Path) -> bool:
    """Return whether rank 0 has told the launcher that it runs."""
    return exit_file.with_name(_STARTED).exists()


def tell_exit_code(code: int, env: Mapping[str, str] = os.environ) -> None:
    """Leave rank 0's exit code for the launcher, if a launcher asked for it.

    Only rank 0 may call this, as the last thing before it ends (or before `MPI_Abort`): `mpirun`'s own status
    says little after a rank was lost. The launcher gives the other ranks a grace time from here, then ends
    them. A full disk does not keep rank 0 from ending the run: the launcher then returns `mpirun`'s status.
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
            f"mpillm: exit code {code} can't be told: {path}: {error.strerror}", file=sys.stderr, flush=True
        )


def told_exit_code(exit_file: Path) -> int | None:
    """Return the code that rank 0 left in `exit_file`, or None when it left none."""
    try:
        return int(exit_file.read_text(encoding="ascii"))
    except FileNotFoundError:
        return None


def tell_directory(path: Path, env: Mapping[str, str] = os.environ) -> None:
    """Leave the run directory's absolute path for the launcher, if it asked. Rank 0 only."""
    if EXIT_FILE in env:
        with contextlib.suppress(OSError):  # the launcher then leaves the directory as it is
            Path(env[EXIT_FILE]).with_name(_DIRECTORY).write_bytes(os.fsencode(path))


def told_directory(exit_file: Path) -> Path | None:
    """Return the run directory that rank 0 has told; None if it has told none."""
    try:
        return Path(os.fsdecode(exit_file.with_name(_DIRECTORY).read_bytes()))
    except OSError:
        return None


def let_rank_0_report(env: Mapping[str, str] = os.environ) -> None:
    """Wait until rank 0 has reported an error that every rank found, 5 s at most.

    Most launchers end all ranks as soon as one has failed, and the message would be lost.
    """
    end = time.monotonic() + _RANK_0_S
    while time.monotonic() < end and not (
        EXIT_FILE in env and told_exit_code(Path(env[EXIT_FILE])) is not None
    ):
        time.sleep(0.05)


def _tell_ranks(exit_file: Path, what: str, text: str) -> None:
    """Leave what the launcher tells beside `exit_file`: whole, for a rank may read at any time."""
    draft = exit_file.with_name(f"{what}.draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(exit_file.with_name(what))


def _told_ranks(env: Mapping[str, str], what: str) -> str:
    """Return what the launcher tells; "" if it does not, or its folder is not seen here."""
    try:
        return Path(env[EXIT_FILE]).with_name(what).read_text(encoding="utf-8")
    except (KeyError, OSError):
        return ""


def tell_signal(number: int, exit_file: Path) -> None:
    """Tell the ranks which signal the launcher got: mpirun passes on another one."""
    _tell_ranks(exit_file, _SIGNAL, str(int(number)))


def told_signal(env: Mapping[str, str] = os.environ) -> int | None:
    """Return the launcher's signal; None if there is no signal, no launcher, or its folder is not seen
    here."""
    number = _told_ranks(env, _SIGNAL)
    return int(number) if number else None


def tell_absent(ranks: str, exit_file: Path) -> None:
    """Tell rank 0 which ranks the launcher has not heard of."""
    _tell_ranks(exit_file, _ABSENT, ranks)


def told_absent(env: Mapping[str, str] = os.environ) -> str:
    """Return the ranks that the launcher has not heard of; "" if it has, or does not tell."""
    return _told_ranks(env, _ABSENT)


def tell_ports(ports: Sequence[tuple[int, str, str, int, str]], beyond: str, exit_file: Path) -> None:
    """Tell rank 0 where ranks listen (a `Port` each), and who can't be reached from here."""
    _tell_ranks(exit_file, _PORTS, json.dumps([ports, beyond]))


def told_ports(env: Mapping[str, str] = os.environ) -> tuple[list[tuple[int, str, str, int, str]], str]:
    """Return what the launcher tells by `tell_ports`; nothing if it does not tell."""
    ports, beyond = json.loads(_told_ranks(env, _PORTS) or '[[], ""]')
    return [(rank, host, address, port, own) for rank, host, address, port, own in ports], beyond


def tell_lost(ranks: Iterable[int], exit_file: Path) -> None:
    """Tell rank 0 which ranks the launcher has heard end, before all had joined."""
    _tell_ranks(exit_file, _LOST, " ".join(map(str, ranks)))


def told_lost(env: Mapping[str, str] = os.environ) -> list[int]:
    """Return the ranks that the launcher has heard end; none if it has not, or does not tell."""
    return [int(n) for n in _told_ranks(env, _LOST).split()]


def mpirun_ends_ranks(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether this is a rank of Open MPI's mpirun, started without `mpillm mpirun`.

    On Ctrl-C that mpirun sends its ranks SIGTERM, drops their output from then on, and kills them half a
    second later.
    """
    launcher = find_launcher(env)
    return launcher is not None and launcher.name == OPEN_MPI and EXIT_FILE not in env


def launch_type() -> str | None:
    """Read `LAUNCH_TYPE`: worker or leader, None if it is not set.

    Raises EveryRankError for any other value.
    """
    given = os.environ.get(LAUNCH_TYPE, "")
    kind = given.lower()
    if kind not in ("", "worker", "leader"):
        raise EveryRankError(
            f"environment variable {LAUNCH_TYPE}={given}: not worker or leader"
            + nearest(kind, ("worker", "leader"))
        )
    return kind or None


def drop_launch_type(command: str) -> None:
    """Unset `LAUNCH_TYPE`, so that no child reports it again; rank 0 says that `command` ignores it."""
    kind = os.environ.pop(LAUNCH_TYPE, None)
    launcher = find_launcher()
    if kind and (launcher is None or launcher.first):
        print(
            f"mpillm: note: the environment variable {LAUNCH_TYPE}={kind} has no effect on {command}:"
            " only run-llm-server reads it, for the servers of a disaggregation YAML",
            file=sys.stderr,
            flush=True,
        )
