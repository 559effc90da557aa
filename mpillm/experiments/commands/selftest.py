"""``python -m mpillm selftest``: test a kind of server or a core, and write a report."""

from __future__ import annotations

from collections.abc import Sequence

from launch.default_paths import RUNS
from launch.launcher import EveryRankError, one_of_several
from mpillm.doctor.steps import step_runner
from mpillm.experiments.run_series import GROUP, SeriesOptions, parse_series
from mpillm.experiments.selftest import GOOD, CaseBuilder, cases
from mpillm.options.command_line import Parser
from mpillm.options.field import option
from mpillm.options.options import parse_run
from mpillm.options.parsers import seconds


class Options(SeriesOptions, group=GROUP):
    """Options of ``selftest``."""

    output = SeriesOptions.output.but("the report, a text that can be sent", default="selftest.txt")
    step_deadline = option("longest time of a case, seconds", seconds, default=1800.0)


def main(argv: Sequence[str]) -> int:
    """Run the cases; print and write their results. Return STAGE_FAILED if one fails."""
    parser = Parser(
        prog="mpillm selftest",
        description="Test a kind of server (--server) or a core (--core_type) as installed here: both"
        " scenarios, the layouts that this machine supports, its answers compared with the embedded engine's,"
        " its counts, and the report of its loss. Each case also takes the other options of run.",
        epilog="examples:\n  python -m mpillm selftest --server=vllm --model_path DIR\n"
        "  python -m mpillm selftest --core_type=trtllm_executor --engine_dir DIR --output report.txt",
    )
    options, args = parse_series(argv, Options, parser)
    if one_of_several() is not None:
        raise EveryRankError("selftest starts ranks itself: type it once, without mpirun or srun")
    parse_run(args, parser)
    with step_runner(
        "Self test", ["selftest", *argv], options.output or "", options.log_dir or str(RUNS)
    ) as report:
        builder = CaseBuilder(args, options.mpirun_options, report.folder, options.step_deadline)
        return report.run_all(cases(builder), GOOD, options.step_deadline)
