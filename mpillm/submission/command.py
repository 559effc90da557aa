"""``python -m mpillm submission``"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from disagg.errors import ConfigError
from mpillm import fields
from mpillm.command_line import Parser
from mpillm.config import RunConfig, collect
from mpillm.configurator import Field
from mpillm.errors import ExitCode
from mpillm.fields.parsers import boolean
from mpillm.json_files import as_written, read_json
from mpillm.submission.layout import Submission, check_accuracy_file
from mpillm.submission.rules import MEASUREMENTS, missing_scenarios
from mpillm.submission.runs import KINDS, Result, Run, group, read_run
from mpillm.submission.system import SYSTEM_FIELDS, measurements, overlay, same_system, system_description, unknown

# What makes a piece that is missing.
_CURE = {
    "performance": "a run without --test_mode and --compliance_test",
    "accuracy": "a run with --test_mode AccuracyOnly",
    "TEST06": "a run with --compliance_test TEST06",
}
_GROUP = "submission"
_FIELDS = (
    Field("output", "the folder that the submission is made in", group=_GROUP),
    fields.submitter,
    fields.division,
    Field("system_name", "the system's name, and its folder's [default: the runs' --system_name]", group=_GROUP),
    Field("system_description", "a JSON file with an object that is laid over the description of the system", group=_GROUP),
    Field("measurements", "a JSON file with an object that is laid over the measurements.json of each result", group=_GROUP),
    Field("force", "replace what this submitter has in this division there", boolean, default=False, group=_GROUP),
)


def _parser() -> Parser:
    parser = Parser(
        prog="mpillm submission",
        usage="python -m mpillm submission RUN_DIR… --output DIR --submitter NAME --system_name NAME [options]",
        description="Lay runs out as a submission to MLPerf Inference (v6.0, v6.1), and say what is missing.",
        epilog="example:\n  python -m mpillm submission build/runs/* --output build/submission --submitter Us --system_name 8xH200",
    )
    parser.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", help="run directories: performance, accuracy and TEST06 runs")
    return parser


def main(argv: Sequence[str]) -> int:
    """Write the submission; exit code TEST_FAILED if something that it needs is missing."""
    parser = _parser()
    options = collect(argv, _FIELDS, parser)
    if not options.output:
        raise ConfigError("mpillm submission: --output is missing: the folder to write to")
    submitter = _name("submitter", options.submitter)
    paths = [Path(path) for path in parser.parse_args(argv).run_dirs]
    for path in paths:
        if sum(path.resolve() == other.resolve() for other in paths) > 1:
            raise ConfigError(f"{path} is given twice")
    runs = [read_run(path) for path in paths]
    results = group(runs)
    same_system(runs)
    system_name = _name("system_name", options.system_name or runs[0].directory.config.get("system_name"))
    system = overlay(
        system_description(runs[0], submitter, options.division, system_name),
        options.system_description,
        SYSTEM_FIELDS,
        "--system_description",
    )
    for result in results:
        found = measurements(next(iter(result.runs.values())))
        result.measurements = overlay(found, options.measurements, MEASUREMENTS, "--measurements")
    problems = [problem for result in results for problem in _problems(result, options.division)]
    if options.division == "closed":
        problems += _scenario_problems(results)
    written = Submission(options.division, submitter, system_name, system, results).write(Path(options.output), options.force)
    _report(written, results, runs[0], unknown(system), problems, options)
    return ExitCode.TEST_FAILED if problems else ExitCode.DONE


def _name(option: str, value: str | None) -> str:
    """A name that becomes a folder's."""
    if not value:
        raise ConfigError(f"mpillm submission: --{option} is missing")
    if not re.fullmatch(r"[\w][\w.+-]*", value):
        raise ConfigError(f"--{option} {value}: it names a folder: letters, digits and . _ + - only")
    return value


def _problems(result: Result, division: str) -> list[str]:
    """What a result lacks, and what is wrong with its runs. ConfigError: an accuracy.txt of another run."""
    where = f"{result.benchmark} {result.scenario}"
    needed = KINDS if division == "closed" else tuple(kind for kind in KINDS if kind != "TEST06")  # not asked of the open division
    problems = [f"{where}: no {kind} run: {_CURE[kind]}" for kind in needed if kind not in result.runs]
    if division == "closed" and any(run.directory.workload.scaled for run in result.runs.values()):
        problems.append(f"{where}: the model is a tiny one (--model_scale tiny)")
    for run in result.runs.values():
        found = run.problems() + (run.changed() if division == "closed" else [])
        problems += [f"{where}: {run.path}: {problem}" for problem in found]
    blank = [key for key, value in result.measurements.items() if not value]
    problems += [f"{where}: {key} of measurements.json is not known: give it with --measurements" for key in blank]
    if accuracy := result.runs.get("accuracy"):
        if (accuracy.path / "accuracy.txt").exists():
            check_accuracy_file(accuracy)
            if division == "closed" and (missed := _missed(accuracy.path / "accuracy.json")):
                problems.append(f"{where}: {accuracy.path}: the accuracy target is not reached: {', '.join(missed)}")
        else:
            problems.append(f"{where}: no accuracy.txt: python -m mpillm accuracy {accuracy.path}")
    if test06 := result.runs.get("TEST06"):
        verified = test06.path / "TEST06" / "verify_accuracy.txt"
        if not verified.exists():
            problems.append(f"{where}: TEST06 is not verified: python -m mpillm compliance {test06.path}")
        elif "TEST06 verification complete" not in verified.read_text(encoding="utf-8"):
            problems.append(f"{where}: TEST06 failed ({verified})")
    return problems


def _missed(report: Path) -> list[str]:
    """The scores that are too low, or not there; none is known of if accuracy.txt was made by another program."""
    if not report.exists():
        return []
    with as_written(report):
        return [check["name"] for check in read_json(report)["checks"] if not check["passed"]]


def _scenario_problems(results: Sequence[Result]) -> list[str]:
    by_benchmark: dict[str, set[str]] = {}
    for result in results:
        by_benchmark.setdefault(result.benchmark, set()).add(result.scenario)
    return [
        f"{benchmark}: the closed division asks for {scenario} as well"
        for benchmark, scenarios in by_benchmark.items()
        for scenario in missing_scenarios(benchmark, scenarios)
    ]


def _report(written: Path, results: Sequence[Result], run: Run, blank: list[str], problems: list[str], options: RunConfig) -> None:
    print(written)
    for result in results:
        print(f"  {result.benchmark} {result.scenario}: {', '.join(result.runs)}")
    if blank:
        print(f'  "N/A" stands in the system description for: {", ".join(blank)} (give them with --system_description)')
    for problem in problems:
        print(f"  missing or wrong: {problem}")
    version = run.round.name if run.round else "VERSION"
    print(
        "  the checker, from a clone of mlcommons/inference in the current directory:\n"
        f"    python3 -m inference.tools.submission.submission_checker.main --input {shlex.quote(options.output)} --version {version}"
        f" --submitter {options.submitter}\n"
        "  keep the run directories: MLCommons may ask for the whole accuracy logs"
    )
