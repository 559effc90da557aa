"""``python -m mpillm accuracy``"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError
from mpillm.accuracy.references import read_references
from mpillm.accuracy.rouge import need_libraries
from mpillm.accuracy.scores import Answer, Row, Scores, pass_at_1
from mpillm.accuracy.targets import TASKS, Check, Task, check
from mpillm.command_line import Parser
from mpillm.config import collect
from mpillm.configurator import Field
from mpillm.errors import ExitCode
from mpillm.json_files import as_writable, read_json, write_json, write_text
from mpillm.loadgen.logs import ACCURACY, LoggedAnswer, accuracy_samples, digest, read_answers, read_detail
from mpillm.report.run_directory import RunDirectory
from mpillm.tokenizer import Tokenizer, load_tokenizer

COMPLETIONS = "mbxp_completions.json"
_GROUP = "accuracy"
_FIELDS = (
    Field("dataset_path", "the data set, with its reference answers [default: the run's]", group=_GROUP),
    Field("tokenizer", "a folder with the tokenizer.json that answers are decoded by [default: the run's model_path]", group=_GROUP),
    Field("mbxp", "mixtral-8x7b: the file that the reference's evaluate_mbxp wrote (evaluated_test.json)", group=_GROUP),
)


def _parser() -> Parser:
    parser = Parser(
        prog="mpillm accuracy",
        usage="python -m mpillm accuracy RUN_DIR [options]",
        description="Score the answers of an accuracy run, and write RUN_DIR/accuracy.txt and accuracy.json.",
        epilog="examples:\n"
        "  python -m mpillm accuracy build/runs/accuracy --dataset_path open_orca.pkl --tokenizer MODEL_DIR\n"
        "  python -m mpillm accuracy build/runs/accuracy --mbxp evaluated_test.json      # mixtral-8x7b: docs/submission.md says how",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="a run directory of --test_mode AccuracyOnly")
    return parser


def main(argv: Sequence[str]) -> int:
    """Scores are a result, so that the exit code is DONE whatever they are."""
    parser = _parser()
    options = collect(argv, _FIELDS, parser)
    run = RunDirectory.read(Path(parser.parse_args(argv).run_dir))
    task = task_of(run)
    if options.mbxp and "mbxp" not in task.references:
        raise ConfigError(f"--mbxp {options.mbxp}: {run.benchmark} has no MBXP samples")
    answers = _answers(run)
    rows = _rows(run, options.dataset_path)
    tokenizer = _tokenizer(run, options.tokenizer)
    need_libraries()
    if (worst := max(answer.index for answer in answers)) >= len(rows):
        raise ConfigError(f"the data set has {len(rows)} samples, and the run answered sample {worst}: it is not the run's data set")
    target = float(run.config["accuracy_target"])
    print(f"{run.benchmark}: {len(answers)} answers, target {100 * target:g} % of the reference", flush=True)  # scoring may take minutes
    texts = [Answer(tokenizer.decode(answer.tokens), len(answer.tokens)) for answer in answers]
    scores = task.score(texts, [rows[answer.index] for answer in answers])
    if scores.completions:
        scores = _with_mbxp(run, scores, options.mbxp)
    checks = check(task, scores.values, target)
    with as_writable(run.path / "accuracy.txt"):
        _write(run, scores, checks)
    _show(run, scores, checks)
    return ExitCode.DONE


def task_of(run: RunDirectory) -> Task:
    """ConfigError: `run` is no accuracy run of a workload that we can score."""
    if not run.is_accuracy:
        raise ConfigError(f"{run.path} is a performance run; accuracy is judged by one with --test_mode AccuracyOnly")
    return TASKS[run.benchmark.removesuffix("-interactive")]


def _answers(run: RunDirectory) -> list[LoggedAnswer]:
    answers = read_answers(run.path / ACCURACY)
    expected = accuracy_samples(read_detail(run.path))
    if len(answers) != expected:
        raise ConfigError(f"{run.path / ACCURACY} has answers to {len(answers)} samples; the data set has {expected}")
    return answers


def _rows(run: RunDirectory, given: str | None) -> Sequence[Row]:
    """The references: of the data set that was given, that was made for this run, or that the run names."""
    made = run.path / run.workload.frame_file
    path = given or (str(made) if run.workload.scaled and made.exists() else run.config.get("dataset_path"))
    if not path:
        raise ConfigError(f"{run.path}: the run names no data set: give the one with the reference answers with --dataset_path")
    if not given and not Path(path).exists():
        raise ConfigError(f"{run.path}: its data set {path} is not to be found from here: say where it is with --dataset_path")
    return read_references(run.workload, path)


def _tokenizer(run: RunDirectory, given: str | None) -> Tokenizer:
    folder = given or run.config.get("model_path")
    if given and not (Path(given) / "tokenizer.json").is_file():
        raise ConfigError(f"--tokenizer {given}: no folder with a tokenizer.json")
    has_file = folder is not None and (Path(folder) / "tokenizer.json").is_file()
    if not has_file and run.config.get("model_scale") != "tiny":
        raise ConfigError(
            f"{run.path}: no tokenizer.json in the run's model_path ({folder or 'not given'}): give the folder that has it with --tokenizer"
        )
    return load_tokenizer(Path(folder) if has_file and folder else None)


def _with_mbxp(run: RunDirectory, scores: Scores, evaluated: str | None) -> Scores:
    """The code that is to be executed, written out; and its score, if somebody has done it."""
    if evaluated is None:
        with as_writable(run.path / COMPLETIONS):
            write_json(run.path / COMPLETIONS, scores.completions)
        note = f"mbxp: not scored: {run.path / COMPLETIONS} is yet to be executed (docs/submission.md), then give --mbxp"
        return Scores(scores.values, [*scores.notes, note])
    try:
        value = pass_at_1(scores.completions, read_json(Path(evaluated)))
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ConfigError(f"--mbxp {evaluated}: not an evaluation of this run's {COMPLETIONS}: {type(error).__name__} {error}") from error
    return Scores({**scores.values, "mbxp": value}, scores.notes)


def _write(run: RunDirectory, scores: Scores, checks: Sequence[Check]) -> None:
    """accuracy.txt has the form of the references' output; its hash is that of the whole log, as truncate_accuracy_log.py adds it."""
    sha256 = digest(run.path / ACCURACY)
    write_text(run.path / "accuracy.txt", f"\nResults\n\n{scores.values}\n\nhash={sha256}\n")
    report: dict[str, Any] = {
        "benchmark": run.benchmark,
        "accuracy_target": run.config["accuracy_target"],
        "passed": all(c.passed for c in checks),
        "scores": scores.values,
        "checks": [{"name": c.name, "value": c.value, "at_least": c.at_least, "at_most": c.at_most, "passed": c.passed} for c in checks],
        "notes": scores.notes,
        "sha256": sha256,
    }
    write_json(run.path / "accuracy.json", report)


def _show(run: RunDirectory, scores: Scores, checks: Sequence[Check]) -> None:
    for c in checks:
        bounds = f"at least {c.at_least:.4f}" + (f", at most {c.at_most:.4f}" if c.at_most is not None else "")
        value = "-" if c.value is None else f"{c.value:.4f}"
        print(f"  {c.name:<18} {value:>10}  {'ok  ' if c.passed else 'no  '} {bounds}")
    for note in scores.notes:
        print(f"  {note}")
    print(run.path / "accuracy.txt")
