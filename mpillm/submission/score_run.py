"""Score the answers of an accuracy run and write its ``accuracy.txt`` and ``accuracy.json``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from disagg.errors import ConfigError
from mpillm.data.tiny_dataset import DATASET, REFERENCES
from mpillm.data.tokenizer import load_tokenizer
from mpillm.engine.shape.find_model import is_preset
from mpillm.files import as_writable, path_exists, read_json, write_json, write_text
from mpillm.loadgen.logs import ACCURACY, LoggedAnswer, accuracy_samples, digest, read_answers, read_detail
from mpillm.programs.load_clients.inference_endpoint import EVENTS
from mpillm.programs.load_clients.kinds import kind_of
from mpillm.report.run_directory import HARNESS
from mpillm.submission import client_form
from mpillm.submission.judged_run import JudgedRun
from mpillm.submission.references import read_references
from mpillm.submission.rouge import need_libraries
from mpillm.submission.scores import (
    METRICS,
    Check,
    Row,
    ScoredResponse,
    Scores,
    check,
    pass_at_1,
    reference_scores,
)
from mpillm.version import __version__

COMPLETIONS = "mbxp_completions.json"


class AccuracyRun(NamedTuple):
    """An accuracy run with its answers and references."""

    run: JudgedRun
    indices: Sequence[int]  # samples of the answers
    texts: Callable[[], list[ScoredResponse]]  # returns the answers in this order; takes seconds
    rows: Sequence[Row]


def read_accuracy_run(
    run: JudgedRun, dataset_path: str | None, tokenizer: str | None, mbxp: str | None, evaluated: str | None
) -> AccuracyRun:
    """Read the run's answers and references. The run's values replace options that are None.

    Raises ConfigError if something is missing, or does not belong to the run.
    """
    if not run.is_accuracy:
        raise ConfigError(
            f"{run.path}: a performance run has no accuracy; name a run with --test_mode AccuracyOnly"
        )
    if mbxp and "mbxp" not in run.workload.accuracy.references:
        raise ConfigError(f"--mbxp {mbxp}: {run.benchmark} has no MBXP samples")
    by_reference = run.workload.accuracy.metric == "by_reference"
    if evaluated and not by_reference:
        raise ConfigError(f"--evaluated {evaluated}: the answers of {run.benchmark} are scored without it")
    if run.client and by_reference:
        raise ConfigError(
            f"{run.path}: {run.workload.accuracy.evaluator} reads LoadGen's accuracy log, and {run.client}"
            f" made this run's load: its own scorer writes {client_form.ACCURACY}"
        )
    logged = {} if run.client else {answer.index: answer.tokens for answer in _answers(run)}
    if by_reference:
        return AccuracyRun(
            run, [*logged], lambda: [ScoredResponse("", len(tokens)) for tokens in logged.values()], ()
        )
    rows = read_references(run.workload, data_set_of(run, dataset_path))
    decoder = load_tokenizer(tokenizer_folder(run, tokenizer))
    need_libraries()
    by_client = _client_texts(run) if run.client else {}
    indices = [*(by_client or logged)]
    if (worst := max(indices)) >= len(rows):
        raise ConfigError(
            f"the data set has {len(rows)} samples, and the run answered sample {worst}: "
            "it is not the run's data set"
        )

    def texts() -> list[ScoredResponse]:
        if by_client:
            return [ScoredResponse(text, len(decoder.encode_plain(text))) for text in by_client.values()]
        return [ScoredResponse(decoder.decode(tokens), len(tokens)) for tokens in logged.values()]

    return AccuracyRun(run, indices, texts, rows)


def score_run(answers: AccuracyRun, mbxp: str | None, evaluated: str | None) -> tuple[Scores, list[Check]]:
    """Score the answers and write both files. This may take minutes."""
    run, accuracy = answers.run, answers.run.workload.accuracy
    rows = [answers.rows[index] for index in answers.indices] if answers.rows else ()
    scores = METRICS[accuracy.metric](answers.texts(), rows)
    if accuracy.metric == "by_reference":
        scores = _with_evaluation(run, scores, evaluated)
    if scores.completions:
        scores = _with_mbxp(run, scores, mbxp)
    checks = check(accuracy, scores.values, float(run.config["accuracy_target"]))
    with as_writable(run.path / "accuracy.txt"):
        _write(run, len(answers.indices), scores, checks)
    return scores, checks


def _answers(run: JudgedRun) -> list[LoggedAnswer]:
    answers = read_answers(run.path / ACCURACY)
    expected = accuracy_samples(read_detail(run.path))
    if len(answers) != expected:
        raise ConfigError(
            f"{run.path / ACCURACY} has answers to {len(answers)} samples; the data set has {expected}"
        )
    return answers


def _client_texts(run: JudgedRun) -> dict[int, str]:
    """Return the texts that a load client received, by sample."""
    kind = kind_of(run.client)
    n_samples = int(run.result["harness"]["asked"])
    texts = kind.answers(run.path / HARNESS, n_samples) if kind.answers is not None else {}
    if len(texts) != n_samples:
        raise ConfigError(
            f"{run.path / HARNESS}: {run.client} has answers to {len(texts)} of {n_samples} samples"
        )
    return texts


def data_set_of(run: JudgedRun, dataset_path: str | None) -> str:
    """Return `dataset_path`, the path of the tiny data set in the run, or of the run's data set."""
    tiny = run.path / DATASET / REFERENCES
    path = dataset_path
    path = path or (str(tiny) if run.workload.scaled and tiny.exists() else run.config.get("dataset_path"))
    if not path:
        raise ConfigError(
            f"{run.path}: the run names no data set; name one with reference answers: --dataset_path FILE"
        )
    path = str(path)
    if not dataset_path and not path_exists(path):
        raise ConfigError(
            f"{run.path}: its data set {path[:300]} does not exist here; name its path with --dataset_path"
        )
    return path


def tokenizer_folder(run: JudgedRun, option: str | None) -> Path | None:
    """Return the folder with the model's tokenizer.json; None: tokens are bytes (the tiny model)."""
    folder = option or run.config.get("model_path")
    if option and not (Path(option) / "tokenizer.json").is_file():
        raise ConfigError(f"--tokenizer {option}: there is no tokenizer.json in it")
    has_file = folder is not None and path_exists(f"{folder}/tokenizer.json")
    is_tiny = run.config.get("model_scale") == "tiny" and (folder is None or is_preset(str(folder)))
    if not has_file and not is_tiny:
        raise ConfigError(
            f"{run.path}: no tokenizer.json in the run's model_path ({str(folder or 'not given')[:300]}); "
            "name the folder that has it with --tokenizer"
        )
    return Path(folder) if has_file and folder else None


def _with_mbxp(run: JudgedRun, scores: Scores, evaluated: str | None) -> Scores:
    """Write the code to execute, or add its score from the file `evaluated`."""
    if evaluated is None:
        with as_writable(run.path / COMPLETIONS):
            write_json(run.path / COMPLETIONS, scores.completions)
        how = (
            f"execute {run.path / COMPLETIONS} (docs/howto/submission.md), then name its results with --mbxp"
        )
        note = f"mbxp: not scored: {how}"
        return Scores(scores.values, [*scores.notes, note])
    try:
        value = pass_at_1(scores.completions, read_json(Path(evaluated)))
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ConfigError(
            f"--mbxp {evaluated}: not an evaluation of this run's {COMPLETIONS}: "
            f"{type(error).__name__} {error}"
        ) from error
    return Scores({**scores.values, "mbxp": value}, scores.notes)


def _with_evaluation(run: JudgedRun, scores: Scores, evaluated: str | None) -> Scores:
    """Add the scores that the reference's evaluator printed to the file `evaluated`."""
    accuracy = run.workload.accuracy
    names = ", ".join(accuracy.references)
    if evaluated is None:
        path = run.path / ACCURACY
        note = (
            f"{names}: not scored: name a clone of mlcommons/inference with --inference_repo, or run"
            f" {accuracy.evaluator} on {path} and name the file with its output with --evaluated"
        )
        return Scores(scores.values, [note])
    try:
        printed = Path(evaluated).read_text(encoding="utf-8", errors="replace")
        return Scores(reference_scores(accuracy.references, printed, scores.values) | scores.values)
    except OSError as error:
        raise ConfigError(f"{evaluated}: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"{evaluated}: {error}") from None


def _write(run: JudgedRun, n: int, scores: Scores, checks: Sequence[Check]) -> None:
    """Write accuracy.json, and accuracy.txt in the references' form or the load client's result file.

    accuracy.txt ends with the hash of the whole log, like the output of truncate_accuracy_log.py.
    """
    if run.client:
        sha256 = digest(run.path / HARNESS / EVENTS)
        dataset = Path(str(run.config.get("dataset_path") or run.benchmark)).name
        results = client_form.accuracy_results(dataset, n, scores.values, f"mpillm {__version__}")
        write_json(run.path / client_form.ACCURACY, results)
    else:
        sha256 = digest(run.path / ACCURACY)
        write_text(run.path / "accuracy.txt", f"\nResults\n\n{scores.values}\n\nhash={sha256}\n")
    report: dict[str, Any] = {
        "benchmark": run.benchmark,
        "accuracy_target": run.config["accuracy_target"],
        "passed": all(c.passed for c in checks),
        "scores": scores.values,
        "checks": [
            {
                "name": c.name,
                "value": c.value,
                "at_least": c.min_value,
                "at_most": c.max_value,
                "passed": c.passed,
            }
            for c in checks
        ],
        "notes": scores.notes,
        "sha256": sha256,
    }
    write_json(run.path / "accuracy.json", report)
