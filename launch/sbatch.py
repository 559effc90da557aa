"""``python -m mpillm sbatch [options] -- COMMAND``: write a Slurm job script, show it, submit it, follow it.

The script starts the command with srun, on every task. For a command of mpillm on ranks, the script also

- gives the run a log folder that no other job and no requeued start of this job uses, and
- exits with the code that rank 0 wrote, like `mpillm mpirun`. srun's own code is the highest of all tasks.

`run-harness` and other commands with several runs also get such a folder. The script starts them once,
without srun, because they start an mpirun for each run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError, nearest
from launch.default_paths import RUNS
from launch.environment import EXIT_FILE, without_secrets
from launch.follow_job import follow, run_slurm
from launch.help_format import HelpFormatter
from launch.launcher import RANK_COMMANDS
from launch.masking import masked_args
from launch.mpirun import INSTANCE_LOST
from launch.ownership import other_owner, trusted_owners
from launch.safe_text import whole_number

Check = Callable[[Sequence[str], bool], None]
"""Checks a command of mpillm. Receives its arguments, and whether it can use the files of this host.

Raises ConfigError if the command would fail at its start."""

STARTS_RUNS = ("run-harness", "find-max-qps", "ab", "sweep", "advise")
"""The commands that run as one process, and start an mpirun for each of several runs."""

# Names of options of sbatch and srun, by their names in `Job`.
_SHORT = {"output": "-o", "error": "-e", "job_name": "-J", "account": "-A", "partition": "-p"}
_OUTPUTS = ("output", "error", "task_output")
_COUNTS = ("nodes", "ntasks", "ntasks_per_node", "cpus_per_task")
_GPUS = ("gpus_per_node", "gpus_per_task")
_LONG = {name: name.replace("_", "-") for name in (*_COUNTS, *_GPUS, "time")}
_CONTAINER = ("container_image", "container_mounts", "container_workdir")
_OF_SRUN = {**{name: name.replace("_", "-") for name in _CONTAINER}, "task_output": "output"}

EPILOG = """\
examples:
  python -m mpillm sbatch --nodes 2 --ntasks 17 --ntasks_per_node 9 --gpus_per_node 8 --time 02:00:00 \
--submit -- run --benchmarks llama2-70b --model_path DIR
  python -m mpillm sbatch --nodes 1 --ntasks_per_node 8 --container_image IMAGE --dry_run -- bash SCRIPT"""


def _positive(text: str) -> int:
    number = whole_number(text)
    if not number:
        raise argparse.ArgumentTypeError(f"'{text}' must be a whole number of at least 1")
    return number


@dataclass(frozen=True)
class Job:
    """Values of a job script. None is left out. An empty text writes the option without a value."""

    command: tuple[str, ...]
    nodes: int | None = None
    ntasks: int | None = None
    ntasks_per_node: int | None = None
    cpus_per_task: int | None = None
    gpus_per_node: str | None = None
    gpus_per_task: str | None = None
    job_name: str | None = None
    account: str | None = None
    partition: str | None = None
    time: str | None = None
    output: str | None = None
    error: str | None = None
    task_output: str | None = None
    mpi: str = "pmix"
    container_image: str | None = None
    container_mounts: str | None = None
    container_workdir: str | None = None
    setup: tuple[str, ...] = ()
    python: str = sys.executable
    log_root: str = str(RUNS)

    @property
    def starts_runs(self) -> bool:
        """Return whether the command is mpillm's, and starts an mpirun for each of several runs."""
        return self.name in STARTS_RUNS

    @property
    def is_run(self) -> bool:
        """Return whether the command is mpillm's, and runs on the ranks."""
        return self.name in RANK_COMMANDS

    @property
    def name(self) -> str:
        """Return the command's name, with hyphens."""
        return self.command[0].replace("_", "-") if self.command else ""

    def script(self) -> str:
        """Return the job script."""
        lines = ["#!/bin/bash"]
        lines += [f"#SBATCH {name} {_quoted(value)}".rstrip() for name, value in self._set_options(_SHORT)]
        lines += [f"#SBATCH --{name}={_quoted(value)}" for name, value in self._set_options(_LONG)]
        lines += ["", *self.setup, ""] if self.setup else [""]
        logs = self._logs() if self.is_run or self.starts_runs else []
        return "\n".join([*lines, *logs, *self._step(), *self._end()]) + "\n"

    def _set_options(self, options: Mapping[str, str]) -> list[tuple[str, Any]]:
        """Return the options that have a value: Slurm's name, and the value."""
        return [(name, value) for own, name in options.items() if (value := getattr(self, own)) is not None]

    def _logs(self) -> list[str]:
        """Return lines that make a folder for this start of the job, by SLURM_RESTART_COUNT."""
        root = shlex.quote(self.log_root)
        return [
            f"mkdir -p {root}",
            f'logs=$(realpath {root})/slurm-"$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}"',
            'mkdir "$logs" || exit 2  # another user may have made it, with links in it',
            *([f'export {EXIT_FILE}="$logs/exit_code"'] if self.is_run else []),
            "",
        ]

    def _step(self) -> list[str]:
        command = shlex.join(self.command)
        if self.is_run or self.starts_runs:
            command = f'{shlex.join([self.python, "-m", "mpillm"])} {command} --log_dir "$logs/run"'
        if self.starts_runs:  # the command is one process, whose mpiruns use the whole allocation
            return [f"exec {command}"]
        parts = [
            # Whatever the site's defaults, rank 0 has time to report a lost rank. Slurm may detect a lost
            # node only after minutes, so srun's wait for that node's tasks is limited.
            f"srun --mpi={_quoted(self.mpi)}{' --kill-on-bad-exit=0 --wait=60' if self.is_run else ''}",
            *(f"--{name} {_quoted(value)}" for name, value in self._set_options(_OF_SRUN)),
        ]
        return " \\\n".join([*parts, command]).split("\n")

    def _end(self) -> list[str]:
        if not self.is_run:
            return []
        return [
            "code=$?",
            # srun returns 137 for a killed rank. Rank 0's code, if written, overrides it below.
            f"[ $code -ne {128 + signal.SIGKILL} ] || code={INSTANCE_LOST}",
            f'exit "$(cat "${EXIT_FILE}" 2>/dev/null || echo $code)"',
        ]


def _quoted(value: object) -> str:
    """Return a value as a shell and sbatch, which reads #SBATCH lines like a shell, need it; "" as it is."""
    return shlex.quote(str(value)) if value != "" else ""


def main(argv: Sequence[str], check: Check | None = None) -> int:
    """Write the script; show, submit or follow it. Returns the job's exit code with --wait, otherwise 0.

    `check`: checks the command after --.
    """
    args = list(argv)
    cut = args.index("--") if "--" in args else len(args)
    options = _parser().parse_args([_with_underscores(arg) for arg in args[:cut]])
    command = tuple(args[cut + 1 :])
    job = _job(options, command, check)
    if options.dry_run:
        print(job.script(), end="")
        return 0
    for name in _OUTPUTS:
        if value := getattr(job, name):
            _check_output(f"--{name}", Path(value))
    path = Path(options.script)
    _write(path, job.script())
    if not (options.submit or options.wait):
        print(f"wrote {path}; submit it with: sbatch {path}")
        return 0
    return _submit(job, path, wait=options.wait)


def _write(path: Path, script: str) -> None:
    """Write a job script, but not through a link. Raises ConfigError if others could replace the script."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        trusted = trusted_owners(path.parent)
        for place in (path.parent, path):
            if (owner := other_owner(place, trusted)) is not None:
                raise ConfigError(
                    f"sbatch: --script {path}: user {owner} owns {place}; name a file in a folder of your own"
                )
        with draft.open("x", encoding="utf-8") as file:
            file.write(script)
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise ConfigError(f"sbatch: --script {path}: {error.strerror}; name another file") from error


def _check_output(option: str, path: Path) -> None:
    """Raise ConfigError if another user made the file, which may be a link to a file of this user."""
    try:
        owner = other_owner(path, trusted_owners(path.parent))
    except OSError:  # a folder that does not exist yet, or in which nothing can be written
        return
    if owner is not None:
        raise ConfigError(f"sbatch: {option} {path}: user {owner} owns it; name a file of your own")


def _with_underscores(arg: str) -> str:
    name, equals, value = arg.partition("=")
    return name.replace("-", "_").replace("__", "--", 1) + equals + value if arg.startswith("--") else arg


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mpillm sbatch",
        usage="python -m mpillm sbatch [options] -- COMMAND [options of COMMAND]",
        description="Write a Slurm job script that runs a command on every task; show, submit, follow it.",
        epilog=EPILOG,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    for name in _COUNTS:
        add(f"--{name}", type=_positive, metavar="N", help=f"sbatch's --{_LONG[name]}")
    for name in _GPUS:
        add(f"--{name}", metavar="N", help=f"sbatch's --{_LONG[name]}; a type may precede it, such as h200:8")
    for name, short in (("job_name", "-J"), ("account", "-A"), ("partition", "-p"), ("time", "-t")):
        add(f"--{name}", short, help=f"sbatch's --{name.replace('_', '-')}")
    add("--output", "-o", help="file for what the job prints; %%j is its number")
    add("--error", "-e", help="file for its error messages [default: with --output]")
    add("--task_output", help="srun's --output: a file for each task; %%t is its number")
    add("--mpi", default="pmix", help="srun's --mpi: pmix for Open MPI, pmi2 for MPICH [default: pmix]")
    add("--container_image", help="run the tasks in this image (pyxis and enroot)")
    add("--container_mounts", help="folders for the container: /here:/there,…")
    add("--container_workdir", help="the working directory in the container")
    add("--setup", action="append", default=[], metavar="LINE", help="a line before srun; may be repeated")
    add(
        "--python",
        default=sys.executable,
        help="the Python on the nodes, or in the container [default: this one]",
    )
    add(
        "--log_root",
        default=str(RUNS),
        help=f"folder that gets one for each start of the job [default: {RUNS}]",
    )
    add(
        "--script",
        default=f"{RUNS}/job.sub",
        metavar="FILE",
        help=f"where to write the script [default: {RUNS}/job.sub]",
    )
    add("--dry_run", action="store_true", help="show the script, write nothing")
    add("--submit", action="store_true", help="submit it")
    add("--wait", action="store_true", help="submit it, print what it prints, and end with its exit code")
    return parser


def _job(options: argparse.Namespace, command: tuple[str, ...], check: Check | None) -> Job:
    if not command:
        raise ConfigError("sbatch: no command to run; it comes after --, as in: sbatch --nodes 2 -- run …")
    if any(arg.partition("=")[0].replace("-", "_") == "__log_dir" for arg in command):
        raise ConfigError(
            "sbatch: --log_dir: a job that is requeued needs a folder for each start;"
            " name the folder above them with --log_root, before --"
        )
    if secrets := without_secrets(command)[1]:
        raise ConfigError(
            f"sbatch: the script would show a secret: set {', '.join(secrets)} in its environment"
        )
    for source, lines in (("the command", command), ("--setup", tuple(options.setup))):
        if tuple(masked_args(lines)) != lines:
            raise ConfigError(
                f"sbatch: {source}: the script would show a secret: set it in sbatch's environment, which the"
                " job gets, such as OPENAI_API_KEY, VLLM_API_KEY or HF_TOKEN"
            )
    value = options.container_image or options.task_output
    if (job := Job(command)).starts_runs and value:
        raise ConfigError(
            f"sbatch: {value}: {job.name} runs as one process, without srun, and starts mpirun;"
            " in a container, or with a file for each task, give it one test at a time: run"
        )
    own = (*RANK_COMMANDS, *STARTS_RUNS)
    if job.name not in own and shutil.which(job.name) is None and (suggestion := nearest(job.name, own)):
        raise ConfigError(f"sbatch: {command[0]} is not a command{suggestion}")
    if check is not None and job.name in own:
        check(command, not options.container_image)
    values = {
        name: getattr(options, name) for name in Job.__dataclass_fields__ if name not in ("command", "setup")
    }
    return Job(command, setup=tuple(options.setup), **values)


def _submit(job: Job, path: Path, wait: bool) -> int:
    if empty := [name for name in ("job_name", "account", "partition") if getattr(job, name) == ""]:
        raise ConfigError(
            f"sbatch: {path} has no value for --{', --'.join(empty)}: fill it in, then submit it"
        )
    if shutil.which("sbatch") is None:
        raise ConfigError(f"sbatch: there is no sbatch in PATH; {path} is written: submit it where Slurm is")
    for pattern in filter(None, (getattr(job, name) for name in _OUTPUTS)):
        # Slurm does not create folders, and does not report a missing folder.
        if "%" not in str(Path(pattern).parent):
            Path(pattern).parent.mkdir(parents=True, exist_ok=True)
    # Slurm gets the text, not the file: a user who owns a folder above it may have replaced the file.
    name = [] if job.job_name else [f"--job-name={path.name}"]
    number = run_slurm("sbatch", "--parsable", *name, text=job.script()).partition(";")[0]
    print(f"submitted job {number}", file=sys.stderr, flush=True)
    return follow(number) if wait else 0
