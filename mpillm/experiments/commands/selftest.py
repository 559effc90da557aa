"""``python -m mpillm selftest``: whether a kind of server or a core does what it should, in a report."""

from __future__ import annotations

from collections.abc import Sequence

from launch.default_paths import RUNS
from launch.launcher import EveryRankError, one_of_several
from mpillm.doctor.steps import step_runner
from mpillm.experiments.run_series import GROUP, SeriesOptions, parse_series
from mpillm.experiments.selftest import GOOD, Tried, cases
from mpillm.options.command_line import Parser
from mpillm.options.field import option
from mpillm.options.options import parse_run
from mpillm.options.parsers import seconds


class Options(SeriesOptions, group=GROUP):
    """Options of ``selftest``."""

    output = SeriesOptions.output.but("the report, a text that can be sent", default="selftest.txt")
    step_deadline = option("longest time of a case, seconds", seconds, default=1800.0)


def main(argv: Sequence[str]) -> int:
    """Try the cases; print and write what came of them. Return STAGE_FAILED if one did not come out."""
    parser = Parser(
        prog="mpillm selftest",
        description="Try a kind of server (--server) or a core (--core_type) on what is installed here: both"
        " scenarios, layouts that this machine can have, its answers beside the embedded engine's, its"
        " counts, and whether it is named when it is lost. Other options are those of run, for each case.",
        epilog="examples:\n  python -m mpillm selftest --server=vllm --model_path DIR\n"
        "  python -m mpillm selftest --core_type=trtllm_executor --engine_dir DIR --output report.txt",
    )
    options, words = parse_series(argv, Options, parser)
    if one_of_several() is not None:
        raise EveryRankError("selftest starts ranks itself: type it once, without mpirun or srun")
    parse_run(words, parser)
    with step_runner(
        "Self test", ["selftest", *argv], options.output or "", options.log_dir or str(RUNS)
    ) as report:
        tried = Tried(words, options.mpirun_options, report.folder, options.step_deadline)
        return report.run_all(cases(tried), GOOD, options.step_deadline)
