"""The commands. Each is imported when it is called, so that none pays for another's packages."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

from disagg.errors import ConfigError, nearest
from launch.environment import tell_started
from launch.signals import stop_signals
from mpillm.errors import STORAGE_ERRORS, ExitCode, StageError

# name: (module:function of a list of arguments to an exit code, what it does)
COMMANDS = {
    "run": ("mpillm.run:main", "run a test on the ranks of this mpirun or srun"),
    "mpirun": ("launch.mpirun:main", "print and start the right mpirun line for a command: mpirun -n 5 run …"),
    "plan": ("mpillm.planning:plan_main", "show what would run where, without MPI"),
    "generate-engines": ("mpillm.builder.commands:generate_engines_main", "quantise a model and build its engine"),
    "generate-triton-config": ("mpillm.builder.commands:generate_triton_config_main", "write Triton model repositories for an engine"),
    "generate-disagg-config": ("mpillm.builder.disagg_config:main", "write a disaggregation YAML from options"),
    "run-llm-server": ("mpillm.server:main", "start the servers that a core needs, and stay until they end"),
    "run-harness": ("mpillm.harness:main", "run a test for each workload and scenario named"),
    "accuracy": ("mpillm.accuracy.command:main", "score the answers of an accuracy run"),
    "compliance": ("mpillm.compliance:main", "check a run of compliance test TEST06"),
    "submission": ("mpillm.submission.command:main", "lay runs out as a submission to MLPerf Inference"),
    "fetch-model": ("mpillm.models:main", "fetch a small real model"),
    "bench": ("mpillm.bench:main", "measure: bench routing, engine, load, dataset, agreement, handoff"),
}


def usage() -> str:
    """The text of --help."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {description}" for name, (_, description) in COMMANDS.items()]
    return (
        "usage: python -m mpillm COMMAND [options]\n\n"
        "MLPerf Inference LLM benchmarks on a cluster, from one mpirun.\n\n"
        + "\n".join(lines)
        + "\n\n`python -m mpillm COMMAND --help` lists a command's options."
    )


def main(argv: Sequence[str]) -> int:
    """Run a command; its exit code. Bad input is one message on stderr and exit code 2."""
    _open_closed()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows another one
    try:
        code = _run(argv)
        sys.stdout.flush()  # what can't be written is said here, and not by Python at its exit
        return code
    except ConfigError as error:
        print(f"mpillm: {error}", file=sys.stderr)
        return ExitCode.USAGE
    except StageError as error:
        print(f"mpillm: {error}", file=sys.stderr)
        return ExitCode.STAGE_FAILED
    except BrokenPipeError:
        # The reader (head, say) has gone. Python would complain again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return ExitCode.DONE
    except OSError as error:
        if sys.flags.dev_mode:  # python -X dev: it may be a mistake of ours
            raise
        if error.filename is not None:
            print(f"mpillm: {error.filename}: {error.strerror}", file=sys.stderr)
            return ExitCode.USAGE
        if error.errno not in STORAGE_ERRORS:  # of which the system does not say for which file
            raise
        print(f"mpillm: a file, or what is printed, can't be written: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return ExitCode.STAGE_FAILED


def _open_closed() -> None:
    """Where the caller has closed stdout or stderr (`>&-`), what is printed goes nowhere, and no file opened later gets its number."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)  # for the ranks
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115 - for as long as the process is there


def _run(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return ExitCode.DONE if argv else ExitCode.USAGE
    name = argv[0].replace("_", "-")
    if name not in COMMANDS:
        raise ConfigError(f"no command '{argv[0]}'{nearest(name, COMMANDS)}; there are: {', '.join(COMMANDS)}")
    tell_started()
    module, _, function = COMMANDS[name][0].partition(":")
    with _stoppable():
        return int(getattr(importlib.import_module(module), function)(list(argv[1:])))


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """A signal that asks to stop ends a command as an exception does, so that it removes what it has begun. A second one kills.

    Commands that end otherwise (ranks, servers) put handlers of their own in the place of these.
    """
    if threading.current_thread() is not threading.main_thread():  # no other thread may set handlers
        yield
        return
    previous = {number: signal.signal(number, _stop) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            if signal.getsignal(number) is _stop:
                signal.signal(number, handler)


def _stop(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise SystemExit(128 + number)  # as a shell has it
