"""``python -m mpillm doctor``: examine machine, launcher and network before a run, on all ranks."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

from disagg.errors import ConfigError
from launch.default_paths import RUNS
from launch.environment import write_exit_code
from launch.launcher import EveryRankError, find_launcher, one_of_several
from launch.signals import stop_signals
from mpillm.comms.start import start_mpi
from mpillm.doctor.findings import Line, Status, World, report_lines, worst
from mpillm.errors import ExitCode
from mpillm.options.command_line import Parser
from mpillm.options.field import option
from mpillm.options.fields.results import OutputFields
from mpillm.options.parsers import boolean, seconds
from mpillm.options.values import Values, collect
from mpillm.version import __version__

_START_SHARE = 0.5  # of the deadline, for MPI_Init
_LATE_S = 10.0  # after the deadline; then even rank 0 is stuck


class Options(Values, group="cluster report"):
    """Options of ``doctor``."""

    json = option("print JSON", boolean, default=False, group="output")
    log_dir = OutputFields.log_dir.but(
        "the run directory whose disk to examine", default=str(RUNS), group="output"
    )
    cluster_report = option(
        "test hosts, MPI and runs step by step, and write a report that you can send to this file; type it"
        " once, without mpirun or srun",
        str,
    )
    mpirun = option(
        'with --cluster_report: the arguments of `mpillm mpirun`, such as "-n 4 -H a:2,b:2"'
        " [default: the tasks of Slurm's allocation, or three ranks on this host]",
        shlex.split,
    )
    deadline = option("longest time for the examination, seconds", seconds, default=30.0, group="deadlines")


def main(argv: Sequence[str]) -> int:
    """Examine; rank 0 prints. Return 1 if a check failed, 0 otherwise."""
    for number in stop_signals():
        signal.signal(number, signal.SIG_DFL)  # a handler could not run while MPI waits
    parser = Parser(
        prog="mpillm doctor",
        description="Examine machine, launcher and network before a run, on all ranks.",
        epilog="example:\n  python -m mpillm mpirun -n 4 doctor",
    )
    try:
        config = collect(argv, Options, parser)
    except ConfigError as error:
        raise EveryRankError(str(error)) from None
    if config.cluster_report:
        return _report_cluster(config.cluster_report, config, argv)
    from mpillm.doctor.mpi_start_checks import find_start_problem, is_thread_shortage

    try:
        if problem := find_start_problem():
            resource = problem.partition(":")[0]
            raise EveryRankError(
                f"MPI was not started: its ranks would end, for lack of {resource} (see below)"
            )
        comm = start_mpi(["doctor", *argv], _START_SHARE * config.deadline)
    except EveryRankError as error:
        launcher = find_launcher()
        if launcher is not None and not launcher.first:
            return ExitCode.DONE  # the first rank reports for all
        return _alone(config, error)
    # These import mpi4py.MPI, which start_mpi has prepared.
    from mpi4py import MPI

    from mpillm.doctor.exam import Rank0Exam, RankExam

    left_s = _START_SHARE * config.deadline
    watchdog = threading.Timer(config.deadline + _LATE_S, _give_up, (comm.rank, config.deadline))
    watchdog.daemon = True
    code = int(ExitCode.DONE)
    try:
        watchdog.start()
        if comm.rank == 0:
            exam = Rank0Exam(comm, MPI.COMM_WORLD, left_s)
            world, lines = exam.examine(Path(config.log_dir))
            finalize = exam.end()
        else:
            finalize = RankExam(comm, MPI.COMM_WORLD, config.deadline + _LATE_S / 2).run()
    except Exception as error:  # noqa: BLE001 - the others may be waiting for this rank
        if not is_thread_shortage(error):
            traceback.print_exc()
        else:
            from mpillm.doctor.local_checks import explain

            cause = explain("can't start new thread") or str(error)
            print(f"mpillm: rank {comm.rank}: doctor can't go on: {cause}", file=sys.stderr, flush=True)
        comm.Abort(ExitCode.STAGE_FAILED)
    if comm.rank == 0:  # after the others have ended: the output may be a full disk
        code = _report(config, lines, comm.size, world)
        write_exit_code(code)
    if not finalize:
        sys.stdout.flush()
        if comm.rank == 0:
            comm.Abort(code)  # otherwise the launcher waits for ranks that do not answer
        os._exit(code)
    watchdog.cancel()
    return code


def _report_cluster(file: str, config: Options, argv: Sequence[str]) -> int:
    """Run all steps of a cluster report and write it. Returns STAGE_FAILED if one failed."""
    from mpillm.doctor import cluster_report
    from mpillm.doctor.steps import step_runner

    if one_of_several() is not None:
        raise EveryRankError("--cluster_report starts ranks itself: type it once, without mpirun or srun")
    mpirun_args = config.mpirun or ["-n", os.environ.get("SLURM_NTASKS", "3")]
    cluster_report.ranks_of(mpirun_args)
    with step_runner("Cluster report", ["doctor", *argv], file, config.log_dir) as report:
        pmi = cluster_report.slurm_pmi(report.library)
        steps = cluster_report.plan_steps(mpirun_args, pmi, report.folder)
        return report.run_all(steps, cluster_report.GOOD, cluster_report.STEP_S)


def _alone(config: Options, error: EveryRankError) -> int:
    """Report this process's findings without MPI, and the cause."""
    from mpillm.doctor.local_checks import lines_alone

    launcher = find_launcher()
    n_ranks = launcher.size or 1 if launcher else 1
    code = _report(config, lines_alone(error, Path(config.log_dir)), n_ranks, World({}))
    write_exit_code(code)
    return code


def _report(config: Options, lines: Sequence[Line], n_ranks: int, world: World) -> int:
    """Print the lines and return the exit code. `world`: the ranks that answered."""
    nodes = sorted(world.first_ranks())
    bad = worst(lines) is Status.FAILURE
    if config.json:
        summary = {"mpillm": __version__, "ranks": n_ranks, "nodes": nodes, "worst": worst(lines).value}
        print(json.dumps(summary | {"lines": [line.to_json() for line in lines]}, indent=2), flush=True)
    else:
        where = f", nodes: {len(nodes)}" if nodes else ""
        head = f"mpillm {__version__} doctor: ranks: {n_ranks}{where}\n"
        print(head, *report_lines(lines, world.nodes), sep="\n", flush=True)
    return int(ExitCode.STAGE_FAILED if bad else ExitCode.DONE)


def _give_up(rank: int, deadline: float) -> None:
    message = f"mpillm: rank {rank}: doctor did not end within --deadline {deadline:g} s"
    print(message, file=sys.stderr, flush=True)
    if rank == 0:
        write_exit_code(ExitCode.STAGE_FAILED)
    os.kill(os.getpid(), signal.SIGKILL)
