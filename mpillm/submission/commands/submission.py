"""``python -m mpillm submission``"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from disagg.errors import ConfigError
from launch.default_paths import RUNS
from mpillm.errors import ExitCode
from mpillm.files import as_written
from mpillm.options.command_line import Parser
from mpillm.options.field import option
from mpillm.options.fields.general import GeneralFields
from mpillm.options.fields.results import OutputFields
from mpillm.options.values import Values, collect
from mpillm.report.run_list import run_path
from mpillm.submission.checker import rejected
from mpillm.submission.package import Submission, check_accuracy_file, summary
from mpillm.submission.rules import MEASUREMENTS, folder_name
from mpillm.submission.submitted_runs import group, read_run, round_of_results
from mpillm.submission.system import SYSTEM_FIELDS, measurements, overlay, same_system, system_description

_GROUP = "submission"


class _Options(Values, group=_GROUP):
    """Options of ``submission``."""

    output = OutputFields.output.but("the folder that the submission is made in", group=_GROUP)
    submitter = OutputFields.submitter
    division = OutputFields.division
    system_name = GeneralFields.system_name.but(
        "the system's name, and its folder's [default: the runs' --system_name]", group=_GROUP
    )
    system_description = option("a JSON file with an object that overrides the description of the system")
    measurements = option("a JSON file with an object that overrides the measurements.json of each result")
    force = GeneralFields.force.but(
        "replace this submitter's folder in this division", default=False, group=_GROUP
    )


def main(argv: Sequence[str]) -> int:
    """Write the submission. Exit code TEST_FAILED: it is incomplete or violates a rule."""
    parser = Parser(
        prog="mpillm submission",
        usage="python -m mpillm submission RUN_DIR… --output DIR --submitter NAME --system_name"
        " NAME [options]",
        description="Arrange runs as a submission to MLPerf Inference (v6.0, v6.1), and list missing parts.",
        epilog=f"example:\n  python -m mpillm submission {RUNS}/* --output build/submission --submitter Us"
        " --system_name 8xH200",
    )
    parser.add_argument(
        "run_dirs",
        metavar="RUN_DIR",
        nargs="+",
        help="run directories: performance, accuracy and compliance runs",
    )
    options = collect(argv, _Options, parser)
    paths = [run_path(path) for path in parser.parse_args(argv).run_dirs]
    for path in paths:
        if sum(path.resolve() == other.resolve() for other in paths) > 1:
            raise ConfigError(f"{path} is given twice")
    with as_written(Path(", ".join(map(str, paths)))):
        runs = [read_run(path) for path in paths]
        named = options.system_name or runs[0].directory.config.get("system_name")
        needed = {"output": options.output, "submitter": options.submitter, "system_name": named}
        if missing := [f"--{name}" for name, value in needed.items() if not value]:
            raise ConfigError(f"mpillm submission: missing options: {', '.join(missing)}")
        submitter = folder_name("submitter", options.submitter)
        system_name = folder_name("system_name", named)
        results = group(runs)
        same_system(runs)
        system = overlay(
            system_description(runs[0], submitter, options.division, system_name),
            options.system_description,
            SYSTEM_FIELDS,
            "--system_description",
        )
        for result in results:
            check_accuracy_file(result)
            fields = measurements(next(iter(result.runs.values())))
            result.measurements = overlay(fields, options.measurements, MEASUREMENTS, "--measurements")
        problems = rejected(results, system, options.division)
        problems += [problem for result in results for problem in result.forbidden(options.division)]
        submission = Submission(options.division, submitter, system_name, system, results)
        output = Path(str(options.output))
        tree = submission.write(output, options.force)
        text = summary(submission, round_of_results(results), problems, output)
    print(tree)
    print(text)
    return ExitCode.TEST_FAILED if problems else ExitCode.DONE
