"""``python -m mpillm run``: start MPI under a deadline, then run `Rank`."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from disagg.errors import ConfigError
from launch.environment import mpirun_ends_ranks, note_warning, write_exit_code
from launch.launcher import find_launcher
from launch.signals import Echoes, stop_signals, title
from mpillm.comms import connection_holder
from mpillm.comms.start import node_name, start_run
from mpillm.core_names import BUILT_IN, lacks
from mpillm.errors import ExitCode, InterruptError
from mpillm.options.fields import DEADLINES
from mpillm.options.options import parse_run
from mpillm.options.run_config import RunConfig

if TYPE_CHECKING:  # these modules need MPI
    from mpillm.comms.communicators import RunComms
    from mpillm.runtime.run_session import RunSession
    from mpillm.runtime.worker_run import WorkerRun


def main(argv: Sequence[str]) -> int:
    """Run ``python -m mpillm run`` on one rank."""
    code, _ = start(argv)
    return code


def start(argv: Sequence[str]) -> tuple[int, str]:
    """Run on one rank; return the exit code and the run directory. A failure ends the process."""
    return start_rank("run", argv, parse_run, _test, serves=False)


def _test(config: RunConfig | None) -> type[RunSession]:
    if config is not None and config.has_conversations:
        from mpillm.runtime.conversation_session import ConversationSession

        return ConversationSession
    if config is not None and config.harness:
        from mpillm.runtime.harness_session import HarnessSession

        return HarnessSession
    from mpillm.runtime.session import Session

    return Session


def start_rank(
    command: str,
    argv: Sequence[str],
    parse: Callable[[Sequence[str]], RunConfig],
    purpose: Callable[[RunConfig | None], type[RunSession]],
    *,
    serves: bool,
    share: Callable[[RunConfig, RunComms], WorkerRun] | None = None,
) -> tuple[int, str]:
    """Run a command on one rank (see `start` and `Rank`).

    `share`: selects this rank's run, if the world has several.
    """
    for number in stop_signals():
        # A rank cannot report a signal before MPI runs, and a handler does not run inside MPI_Init.
        signal.signal(number, signal.SIG_DFL)
    connection_holder.prepare()  # before MPI starts
    gc.disable()  # saves a tenth of PyTorch's import time; `Rank` enables it when the test begins
    config: RunConfig | None = None
    usage_error = ""
    try:
        config = parse(argv)
        _import_numpy()
        if config.core_type in BUILT_IN:
            _check_core(config)
    except ConfigError as error:
        usage_error = str(error)  # reported once, after all ranks have joined
    except OSError as error:
        usage_error = f"{error.filename}: {error.strerror}"
    _warn()
    unchecked = None if usage_error or config is None or config.core_type in BUILT_IN else config

    def import_core() -> None:
        """Import a core that is not mpillm's: its module may import mpi4py.MPI, which would start MPI."""
        nonlocal usage_error
        if unchecked is None:
            return
        try:
            _check_core(unchecked)
        except ConfigError as error:
            usage_error = str(error)
        except Exception as error:  # noqa: BLE001 - of the user's module; `Rank` imports it again, and reports
            usage_error = f"--core_type {unchecked.core_type}: {type(error).__name__}: {error}"

    comms = start_run([command, *argv], config.join_deadline if config else DEADLINES["join"], import_core)
    # Imports mpi4py.MPI, which starts MPI: only after start_run has prepared it.
    from mpillm.runtime.rank import Rank

    if share is not None and config is not None and not usage_error:
        config, comms = share(config, comms)
    try:
        try:
            rank = Rank(comms, config, usage_error, purpose, serves=serves)
        except ModuleNotFoundError as error:  # on rank 0; the others would wait for it
            cause = lacks((error.name or "").partition(".")[0]) or str(error)
            print(f"mpillm: rank {comms.control.rank}, {node_name()}: {cause}", file=sys.stderr, flush=True)
            write_exit_code(ExitCode.USAGE)
            comms.control.Abort(ExitCode.USAGE)
        handler = Interrupts(rank.drain, Echoes())
        for number in stop_signals():
            signal.signal(number, handler)
        return rank.live(), rank.log_dir
    except InterruptError as interrupted:
        os._exit(interrupted.exit_code)  # a signal during the end of the run


def _check_core(config: RunConfig) -> None:
    from mpillm.cores.registry import check_core  # after NumPy

    check_core(config)


def _import_numpy() -> None:
    """Import NumPy with one BLAS thread, unless the user sets a number. (--help does not need NumPy.)

    By default, OpenBLAS starts a thread per CPU core in every rank. On two cores, that is a quarter of the
    CPU time of the import.
    """
    if (variable := "OPENBLAS_NUM_THREADS") in os.environ:
        return
    os.environ[variable] = "1"
    import numpy  # noqa: F401 - OpenBLAS reads the variable here; children of a rank must not

    del os.environ[variable]


def _warn() -> None:
    """Print on rank 0 a problem that makes MPI end all ranks without a report."""
    launcher = find_launcher()
    if launcher is not None and launcher.first:
        from mpillm.doctor.mpi_start_checks import find_start_problem

        if problem := find_start_problem():
            print(f"mpillm: doctor: {problem}", file=sys.stderr, flush=True)


class Interrupts:
    """Signal handler that reports the user's signal once. mpirun forwards a second signal to the ranks."""

    def __init__(self, drain: Callable[[], bool], echoes: Echoes) -> None:
        """`drain`: see `Rank.drain`."""
        self._drain, self._echoes = drain, echoes

    def __call__(self, number: int, frame: object) -> None:
        """Raise InterruptError, unless the signal is an echo or makes the run end in an orderly way."""
        if self._echoes.has(number):  # it must not end a rank that is about to report the first signal
            return
        note_warning(number)
        killed_soon = number == signal.SIGTERM and mpirun_ends_ranks()
        if not killed_soon and self._drain():
            return
        if (by_launcher := InterruptError.by_launcher()) is not None:
            raise by_launcher
        if killed_soon:
            raise InterruptError("Ctrl-C, or a signal to mpirun", number)
        raise InterruptError(title(number), number)
