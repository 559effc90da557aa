"""``python -m mpillm compliance``"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mpillm.config.values import Values, collect
from mpillm.configurator.command_line import Parser
from mpillm.errors import ExitCode
from mpillm.fields.sampling import GenerationFields
from mpillm.report.run_directory import RunDirectory
from mpillm.submission.test06 import verify


class _Options(Values):
    """Options of ``compliance``."""

    end_ids = GenerationFields.end_ids


def main(argv: Sequence[str]) -> int:
    """Check a TEST06 run. Exit code TEST_FAILED: it does not pass."""
    parser = Parser(
        prog="mpillm compliance",
        usage="python -m mpillm compliance RUN_DIR [options]",
        description="Check a run that was made with --compliance_test TEST06, and write RUN_DIR/TEST06 for"
        " the submission.",
        epilog="example:\n  python -m mpillm compliance build/runs/test06",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the run directory")
    options = collect(argv, _Options, parser)
    run = RunDirectory.read(Path(parser.parse_args(argv).run_dir))
    result = verify(run, options.end_ids or run.workload.end_ids)
    print(f"TEST06: {result.samples} answers\n{result.text()}{run.path / 'TEST06'}")
    return ExitCode.DONE if result.passed else ExitCode.TEST_FAILED
