"""``python -m mpillm compliance``"""

from __future__ import annotations

from collections.abc import Sequence

from launch.default_paths import RUNS
from mpillm.errors import ExitCode
from mpillm.files import as_written
from mpillm.options import json_output
from mpillm.options.command_line import Parser
from mpillm.options.field import option
from mpillm.options.fields.data import GenerationFields
from mpillm.options.values import Values, collect
from mpillm.report.run_list import run_path
from mpillm.submission.compliance_tests import verify
from mpillm.submission.judged_run import JudgedRun


class _Options(Values, group="compliance"):
    """Options of ``compliance``."""

    end_ids = GenerationFields.end_ids
    evaluated = option("TEST07: a file with the output of the reference's eval_mlperf_accuracy.py")


def main(argv: Sequence[str]) -> int:
    """Check a compliance run. Exit code TEST_FAILED: it does not pass."""
    parser = Parser(
        prog="mpillm compliance",
        figures=True,
        usage="python -m mpillm compliance RUN_DIR [options]",
        description="Check a run with --compliance_test TEST06, TEST07 or TEST09, and write"
        " RUN_DIR/TEST06 (and so on) for the submission.",
        epilog=f"example:\n  python -m mpillm compliance {RUNS}/test06",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the run directory")
    options = collect(argv, _Options, parser)
    run = JudgedRun.read(run_path(parser.parse_args(argv).run_dir))
    with as_written(run.path):
        result = verify(run, options.end_ids or run.workload.end_ids, options.evaluated)
    print(f"{result.test}: {result.samples} answers\n{result.text}{run.path / result.test}")
    json_output.set_figures({"test": result.test, "samples": result.samples, "passed": result.passed})
    return ExitCode.DONE if result.passed else ExitCode.TEST_FAILED
