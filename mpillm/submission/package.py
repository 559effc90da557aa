"""The files of a submission, in the layout of MLPerf Inference v6.0 and v6.1.

tools/submission/submission_structure.md in mlcommons/inference describes the layout. The accuracy log is
truncated as by truncate_accuracy_log.py there.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError
from mpillm.files import read_object, replace_folder, write_json, write_text
from mpillm.loadgen.logs import ACCURACY, DETAIL, SUMMARY, digest
from mpillm.programs.load_clients.inference_endpoint import CONFIG_LEFT, EVENTS, SUMMARY_LEFT
from mpillm.report.repeat import shell_line, user_options
from mpillm.report.run_directory import HARNESS
from mpillm.report.validity_checks import unchecked
from mpillm.submission import client_form
from mpillm.submission.compliance_tests import FILES
from mpillm.submission.rules import Problem
from mpillm.submission.submitted_runs import Result, SubmittedRun
from mpillm.submission.system import unknown
from mpillm.version import __version__
from mpillm.workloads.rounds import Round

_EXCERPT = 4096  # bytes at each end of a truncated accuracy log
_SOURCE = Path(__file__).parents[2]


@dataclass(frozen=True)
class Submission:
    """The content of a submission."""

    division: str
    submitter: str
    system_name: str
    system: Mapping[str, Any]
    results: Sequence[Result]

    def write(self, output: Path, force: bool) -> Path:
        """Write ``<output>/<division>/<submitter>`` completely or not at all. Returns the folder.

        Raises ConfigError if it exists and `force` is false, or a file cannot be read or written.
        """
        target = output / self.division / self.submitter
        if target.exists() and not force:
            raise ConfigError(f"{target} exists: choose another --output, or --force to replace it")
        new_parents = [folder for folder in target.parents if not folder.exists()]
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".mpillm-", dir=target.parent) as folder:
                tree = Path(folder) / "tree"
                tree.mkdir()
                self._fill(tree)
                replace_folder(tree, target, Path(folder) / "old")
        except OSError as error:
            # copytree's error has a reason for each file.
            why = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror
            where = f"{error.filename or target}"
            raise ConfigError(f"the submission in {output} can't be written: {where}: {why}") from error
        finally:
            if not target.exists():
                for parent in new_parents:
                    with contextlib.suppress(OSError):  # not empty: another submission
                        parent.rmdir()
        return target

    def _fill(self, tree: Path) -> None:
        _write(tree / "systems" / f"{self.system_name}.json", self.system)
        for result in self.results:
            self._result(tree / "results" / self.system_name / result.benchmark / result.scenario, result)
            _write(tree / "src" / result.benchmark / "README.md", _source_readme(result.benchmark))
        ignore = shutil.ignore_patterns("__pycache__")
        for package in ("disagg", "launch", "mpillm"):
            shutil.copytree(_SOURCE / package, tree / "src" / "mpillm" / package, ignore=ignore)

    def _result(self, folder: Path, result: Result) -> None:
        _write(folder / "measurements.json", result.measurements)
        _write(folder / "README.md", _readme(result))
        runs = result.runs
        if result.by_client:
            self._of_client(folder, runs)
            return
        _copy((runs.get("performance") or next(iter(runs.values()))).path, folder, "user.conf")
        if performance := runs.get("performance"):
            _copy(performance.path, folder / "performance" / "run_1", DETAIL, SUMMARY)
        if accuracy := runs.get("accuracy"):
            _copy(accuracy.path, folder / "accuracy", DETAIL, SUMMARY)
            (folder / "accuracy" / ACCURACY).write_bytes(truncated((accuracy.path / ACCURACY).read_bytes()))
            if (accuracy.path / "accuracy.txt").is_file():
                _copy(accuracy.path, folder / "accuracy", "accuracy.txt")
        for test, file in FILES.items():
            if run := runs.get(test):
                _copy(run.path, folder / test / "performance" / "run_1", DETAIL, SUMMARY)
                _copy(run.path, folder / test / "accuracy", ACCURACY)
                if (run.path / test / file).is_file():
                    _copy(run.path / test, folder / test, file)

    def _of_client(self, folder: Path, runs: Mapping[str, SubmittedRun]) -> None:
        if performance := runs.get("performance"):
            left = performance.path / HARNESS
            _copy((left / CONFIG_LEFT).parent, folder, client_form.CONFIG)
            _copy((left / SUMMARY_LEFT).parent, folder / "performance", client_form.SUMMARY)
        if (accuracy := runs.get("accuracy")) and (accuracy.path / client_form.ACCURACY).is_file():
            _copy(accuracy.path, folder / "accuracy", client_form.ACCURACY)


def truncated(log: bytes) -> bytes:
    """Return an accuracy log for the submission; of a long log, only its two ends."""
    return log if len(log) < _EXCERPT else log[:_EXCERPT] + b"\n\n...\n\n" + log[-_EXCERPT:]


def check_accuracy_file(result: Result) -> None:
    """Raise ConfigError if the accuracy run's scores belong to another accuracy log."""
    run = result.runs.get("accuracy")
    if run is not None and run.report is not None and (run.path / "accuracy.json").exists():
        scored, log = read_object(run.path / "accuracy.json").get("sha256"), run.path / HARNESS / EVENTS
        if scored != digest(log):
            raise ConfigError(
                f"{run.path / client_form.ACCURACY} does not belong to {log}: run `python -m mpillm accuracy"
                f" {run.path}`"
            )
        return
    if run is None or not (file := run.path / "accuracy.txt").exists():
        return
    try:
        match = re.search(r"^hash=(\w+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    if match is None or match[1] != digest(run.path / ACCURACY):
        raise ConfigError(
            f"{file} does not belong to the {ACCURACY} beside it: run `python -m mpillm accuracy {run.path}`"
        )


def command_of(run: SubmittedRun) -> str:
    """Return the command that repeats a run, with environment variables as options."""
    ranks = run.directory.result["world_size"]
    return f"python -m mpillm mpirun -n {ranks} run {shell_line(user_options(run.path))}".rstrip()


def _readme(result: Result) -> str:
    lines = [f"# {result.benchmark}, {result.scenario}", "", "The runs, made with mpillm (src/mpillm):", ""]
    for kind, run in result.runs.items():
        lines += [f"{kind}:", "", "```", command_of(run), "```", ""]
    lines += ["Then, on each run directory that it concerns:", "", "```"]
    lines += ["python -m mpillm accuracy RUN_DIR", "python -m mpillm compliance RUN_DIR", "```", ""]
    return "\n".join(lines)


def _source_readme(benchmark: str) -> str:
    return (
        f"# {benchmark}\n\n"
        f"The program is mpillm {__version__}, in ../mpillm. The commands of each scenario are in\n"
        f"results/<system>/{benchmark}/<scenario>/README.md.\n"
    )


def _copy(source: Path, target: Path, *names: str) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copyfile(source / name, target / name)


def _write(path: Path, content: str | Mapping[str, Any]) -> None:
    """Write a text, or an object as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
        write_text(path, content)
    else:
        write_json(path, content)


def summary(submission: Submission, of_round: Round | None, problems: Sequence[Problem], output: Path) -> str:
    """Return a line for each result and problem, and the checker's command line.

    `of_round`: the round with the runs' seeds.
    """
    lines = [
        f"  {result.benchmark} {result.scenario}: {', '.join(result.runs)}" for result in submission.results
    ]
    if blank := unknown(dict(submission.system)):
        names = ", ".join(blank)
        lines.append(f'  the system description has "N/A" for: {names} (give them with --system_description)')
    for problem in problems:
        checks = ", ".join(problem.checks)
        why = f"rejected by the checker ({checks})" if checks else "against the rules"
        lines.append(f"  {why}: {problem.text}")
    lines += [
        f"  not checked: {result.benchmark} {result.scenario}: {run.path}: {text}"
        for result in submission.results
        for run in result.runs.values()
        for text in unchecked(run.directory.result)
    ]
    checker = "python3 -m inference.tools.submission.submission_checker.main"
    return "\n".join(
        [
            *lines,
            "  the checker, from a clone of mlcommons/inference in the current directory:",
            f"    {checker} --input {shlex.quote(str(output))}"
            f" --version {of_round.name if of_round else 'VERSION'} --submitter {submission.submitter}",
            "  keep the run directories: MLCommons may request the whole accuracy logs",
        ]
    )
