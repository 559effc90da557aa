"""The commands. Each is imported only when called, so that none pays for another's packages."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pwd
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from disagg.errors import ConfigError, nearest
from launch import rank_registry
from launch.environment import drop_launch_type, let_rank_0_report, write_exit_code, write_started
from launch.launcher import RANK_COMMANDS, EveryRankError, find_launcher, refuse_copies
from launch.safe_text import safe_stream
from launch.signals import StopSignal, stop_signals
from mpillm.core_names import PLUGIN_PACKAGES, lacks, provided
from mpillm.core_names import module_of as module_of
from mpillm.errors import STORAGE_ERRORS, ExitCode, StageError
from mpillm.version import __version__

COMMANDS = {
    "run": "run a test on the ranks of this mpirun or srun",
    "serve": "put an OpenAI-compatible HTTP endpoint in front of the ranks of this mpirun",
    "mpirun": "print and start the right mpirun line for a command: mpirun -n 5 run …",
    "sbatch": "write a Slurm job script for a command, submit it, follow it: sbatch --nodes 2 -- run …",
    "doctor": "examine machine and launcher before a run, on all ranks",
    "plan": "show what would run where, without MPI",
    "rerun": "repeat the run of a run directory, and report differences",
    "certify": "measure how much of a run's latency and throughput is the harness's own",
    "report": "write the HTML report of a run, report.html, again",
    "runs": "list runs, newest first, and write an index page of them",
    "fetch-model": "fetch a small real model",
    "completion": "print what a shell needs to complete commands and options: bash, zsh, fish",
    **provided("COMMANDS"),
}
"""A line on each command. `module_of` has its module."""

_GROUPS = {
    "run": ("run", "serve", "mpirun", "sbatch"),
    "look": ("plan", "doctor", "report", "runs", "rerun", "certify"),
    "find": (),
    "prepare": ("fetch-model", "completion"),
}
for _package in PLUGIN_PACKAGES:
    for _group, _names in importlib.import_module(_package).GROUPS.items():
        _GROUPS[_group] = (*_GROUPS.get(_group, ()), *_names)
_GROUPED = {name for names in _GROUPS.values() for name in names}


def usage() -> str:
    """Return the text of --help."""
    from launch.help_format import terminal_columns

    width, columns = max(map(len, COMMANDS)), terminal_columns()
    lines = ["MLPerf Inference LLM benchmarks on a cluster, from one mpirun."]
    groups = [*_GROUPS.items(), ("more", [name for name in COMMANDS if name not in _GROUPED])]
    for heading, names in groups:
        if names:
            lines += ["", f"{heading}:"]
        for name in names:
            first, *more = textwrap.wrap(COMMANDS[name], max(30, columns - width - 4), break_on_hyphens=False)
            lines += [f"  {name:<{width}}  {first}", *(" " * (width + 4) + line for line in more)]
    return (
        "usage: python -m mpillm COMMAND [options]\n\n"
        + "\n".join(lines)
        + "\n\n`python -m mpillm COMMAND --help` lists a command's options,\n"
        "`python -m mpillm --version` prints the version."
    )


def main(argv: Sequence[str] | None = None, run: Callable[[Sequence[str]], int] | None = None) -> int:
    """Run a command (default: this process's arguments); return its exit code.

    Bad input is one message on stderr and exit code 2. `run`: of another program, in place of mpillm's
    commands.
    """
    try:
        code = _run_reporting(sys.argv[1:] if argv is None else argv, run or _run)
    except SystemExit:
        rank_registry.deregister()
        raise
    except Exception:  # unexpected: the launcher must name this rank
        rank_registry.wait_registered()
        raise
    rank_registry.deregister()
    return code


def _run_reporting(argv: Sequence[str], run: Callable[[Sequence[str]], int]) -> int:
    """Run a command, and report errors."""
    _open_closed()
    _know_home()
    sys.stdout, sys.stderr = safe_stream(sys.stdout), safe_stream(sys.stderr, messages=True)
    try:
        code = run(argv)
        sys.stdout.flush()  # so that we report a full disk, not Python at its exit
        return code
    except EveryRankError as error:
        launcher = find_launcher()
        if launcher is None or launcher.first:
            print(f"mpillm: {error}", file=sys.stderr, flush=True)
            write_exit_code(ExitCode.USAGE)
        else:
            let_rank_0_report()
        return ExitCode.USAGE
    except ConfigError as error:
        print(f"mpillm: {error}", file=sys.stderr)
        return ExitCode.USAGE
    except ModuleNotFoundError as error:
        if not (message := lacks((error.name or "").partition(".")[0])):
            raise
        print(f"mpillm: {message}", file=sys.stderr)
        return ExitCode.USAGE
    except StageError as error:
        print(f"mpillm: {error}", file=sys.stderr)
        return ExitCode.STAGE_FAILED
    except BrokenPipeError:
        # The reader, such as `head`, has exited. Python would complain again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return ExitCode.DONE
    except OSError as error:
        if sys.flags.dev_mode:  # python -X dev: it may be our mistake
            raise
        if error.filename is not None:
            print(f"mpillm: {error.filename}: {error.strerror}", file=sys.stderr)
            return ExitCode.USAGE
        if error.errno not in STORAGE_ERRORS:  # which come without a file's name
            raise
        print(f"mpillm: a file, or the output, can't be written: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return ExitCode.STAGE_FAILED


def _open_closed() -> None:
    """Point stdout or stderr to /dev/null where the caller has closed it (`>&-`).

    Otherwise a file opened later would get its number.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)  # for the ranks
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115 - for as long as the process is there


def _know_home() -> None:
    """Set HOME if it is unset (`env -i`, cron, a service): Open MPI starts nothing without it."""
    if "HOME" not in os.environ:
        try:
            os.environ["HOME"] = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:  # a container's user without a name
            os.environ["HOME"] = "/"


def _run(argv: Sequence[str]) -> int:
    if "_ARGCOMPLETE" in os.environ:
        from mpillm.commands.completion import complete

        complete({name: module_of(name) for name in COMMANDS})
    if not argv or argv[0] in ("-h", "--help") or list(argv) == ["help"]:
        print(usage())
        return ExitCode.DONE if argv else ExitCode.USAGE
    if argv[0] == "help":
        argv = [argv[1], "--help"]
    if argv[0] in ("-V", "--version"):
        print(f"mpillm {__version__}")
        return ExitCode.DONE
    name = argv[0].removesuffix(".py").replace("_", "-")
    if (instead := provided("PROGRAMS").get(name)) is not None:
        raise ConfigError(f"{argv[0]} is a program of TensorRT-LLM, not a command of mpillm: {instead}")
    if name not in COMMANDS:
        raise ConfigError(
            f"no command '{argv[0]}'{nearest(name, COMMANDS)}; there are: {', '.join(COMMANDS)}"
        )
    return start(name, module_of(name), argv[1:], on_ranks=name in RANK_COMMANDS)


def start(name: str, module: str, args: Sequence[str], *, on_ranks: bool) -> int:
    """Run `main` of the command `name`, which is in `module`, with its arguments; return its exit code.

    Raises EveryRankError if a launcher started several processes of a command that is not `on_ranks`.
    """
    write_started()
    rank_registry.register()
    if {"-h", "--help"} & {*args}:
        if name != "mpirun" and (launcher := find_launcher()) is not None:
            if not launcher.first:
                return ExitCode.DONE
            write_exit_code(ExitCode.DONE)
    else:
        if not on_ranks:
            refuse_copies(name)
        if name not in ("run-llm-server", "mpirun"):
            drop_launch_type(name)
    with _stoppable(reports=not on_ranks):
        command = importlib.import_module(module)
        gc.enable()  # see __main__
        try:
            return int(command.main(list(args)))
        finally:
            if "--json" in args:
                from mpillm.options import json_output

                json_output.end()


@contextlib.contextmanager
def _stoppable(reports: bool) -> Iterator[None]:
    """Let a stop signal end a command as an exception does, so that it cleans up. A second one kills.

    Commands that end otherwise (ranks, servers) install their own handlers. `reports`: whether a line
    names the signal; the launcher reports it for its ranks.
    """
    if threading.current_thread() is not threading.main_thread():  # no other thread may set handlers
        yield
        return
    stopped: list[StopSignal] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        stopped.append(StopSignal(number, is_reported=not reports))
        raise stopped[0]

    previous = {number: signal.signal(number, stop) for number in stop_signals()}
    try:
        yield
    except StopSignal as cause:
        _report(cause)
        raise
    except Exception:
        if not stopped:
            raise
        # C code may have replaced it by its own error: NumPy's import reports that NumPy is broken.
        _report(stopped[0])
        raise stopped[0] from None
    finally:
        for number, handler in previous.items():
            if signal.getsignal(number) is stop:
                signal.signal(number, handler)


def _report(stopped: StopSignal) -> None:
    if not stopped.is_reported:
        print(f"mpillm: {stopped.message()}", file=sys.stderr, flush=True)
