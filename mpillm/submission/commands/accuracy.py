"""``python -m mpillm accuracy``"""

from __future__ import annotations

from collections.abc import Sequence

from launch.default_paths import RUNS
from mpillm.errors import ExitCode
from mpillm.files import as_written, read_json
from mpillm.options import json_output
from mpillm.options.command_line import Parser
from mpillm.options.field import option
from mpillm.options.values import collect
from mpillm.report.run_directory import display_path
from mpillm.report.run_list import run_path
from mpillm.submission.client_form import ACCURACY, CLIENT
from mpillm.submission.evaluator import EvaluatorOptions, evaluator_of
from mpillm.submission.judged_run import JudgedRun
from mpillm.submission.score_run import read_accuracy_run, score_run
from mpillm.submission.scores import Check, Scores

_GROUP = "accuracy"


class _Options(EvaluatorOptions, group=_GROUP):
    """Options of ``accuracy``."""

    dataset_path = option("the data set, with its reference answers [default: the run's]")
    tokenizer = option(
        "a folder with the tokenizer.json that decodes the answers [default: the run's model_path]"
    )
    mbxp = option("mixtral-8x7b: the output file of the reference's evaluate_mbxp (evaluated_test.json)")


def main(argv: Sequence[str]) -> int:
    """Score the run. The exit code is DONE for all scores: they are a result."""
    parser = Parser(
        prog="mpillm accuracy",
        figures=True,
        usage="python -m mpillm accuracy RUN_DIR [options]",
        description="Score the answers of an accuracy run, and write RUN_DIR/accuracy.txt and accuracy.json.",
        epilog="examples:\n"
        f"  python -m mpillm accuracy {RUNS}/accuracy --dataset_path open_orca.pkl --tokenizer MODEL_DIR\n"
        f"  python -m mpillm accuracy {RUNS}/accuracy --mbxp evaluated_test.json      # mixtral-8x7b:"
        " see docs/howto/submission.md\n"
        f"  python -m mpillm accuracy {RUNS}/accuracy --inference_repo inference      # deepseek-r1",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="a run directory of --test_mode AccuracyOnly")
    options = collect(argv, _Options, parser)
    run = JudgedRun.read(run_path(parser.parse_args(argv).run_dir), [CLIENT])
    with as_written(run.path):
        evaluator = evaluator_of(run, options, options.dataset_path, options.tokenizer)
        answers = read_accuracy_run(
            run, options.dataset_path, options.tokenizer, options.mbxp, options.evaluated
        )
        target = 100 * float(run.config["accuracy_target"])
    # Scoring may take minutes.
    print(
        f"{run.benchmark}: {len(answers.indices)} answers, target {target:g} % of the reference", flush=True
    )
    evaluated = options.evaluated
    if evaluator is not None:
        print(f"{evaluator.script} runs; its output: {display_path(evaluator.log)}", flush=True)
        evaluated = str(evaluator.run())
    _show(run, *score_run(answers, options.mbxp, evaluated))
    return ExitCode.DONE


def _show(run: JudgedRun, scores: Scores, checks: Sequence[Check]) -> None:
    for c in checks:
        bounds = f"at least {c.min_value:.4f}"
        bounds += f", at most {c.max_value:.4f}" if c.max_value is not None else ""
        value = "-" if c.value is None else f"{c.value:.4f}"
        print(f"  {c.name:<18} {value:>10}  {'ok  ' if c.passed else 'no  '} {bounds}")
    for note in scores.notes:
        print(f"  {note}")
    print(run.path / (ACCURACY if run.client else "accuracy.txt"))
    json_output.set_figures(read_json(run.path / "accuracy.json"))
