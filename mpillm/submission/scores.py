"""The scores of a run, from decoded answers and the rows of the data set, and the workload's targets.

Names and rounding match the output of the reference scripts of mlcommons/inference
(language/<workload>/evaluate-accuracy.py), which the submission checker expects.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from disagg.errors import ConfigError
from mpillm.submission import rouge
from mpillm.workloads.workload import Accuracy, Metric

_NUMBER = re.compile(r"(?:-|(?<!,))[\d,]*\.?\d+")
_UUID = re.compile(r"\w{8}-\w{4}-\w{4}-\w{4}-\w{12}")
_GSM8K_ANSWER = "The answer is"
_GSM8K_NEXT = "\nQ:"  # a model may continue with another question
_QA_ANSWER = "Answer: "


def gsm8k(answer: str, expected: str) -> bool:
    """Compare the answer's number: the first after the last ``The answer is``, or else the last one."""
    text = answer.split(_GSM8K_NEXT)[0]
    _, marker, tail = text.rpartition(_GSM8K_ANSWER)
    numbers = _NUMBER.findall(tail)[:1] if marker else []
    numbers = numbers or _NUMBER.findall(text)[-1:]
    value = _float(numbers[0].replace(",", "")) if numbers else None
    return value is not None and value == _float(expected)


def _float(text: str) -> float | None:
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def needle(answer: str, expected: str) -> float:
    """Score the answer's UUIDs against the expected ones, in order, in percent.

    As in the reference, the score of a UUID is the share of the expected characters that occur anywhere in
    it.
    """
    uuids, targets = _UUID.findall(answer), _UUID.findall(expected)
    if not uuids:
        return 0.0
    shares = [sum(c.lower() in u.lower() for c in t) / len(t) for u, t in zip(uuids, targets, strict=False)]
    return round(sum(shares) / len(uuids) * 100, 2)


def question(answer: str, expected: str) -> float:
    """Score 100 if the text after the last ``Answer: `` matches an alternative, otherwise 0.

    `expected` separates the alternatives with bars. One matches if it contains the text or is part of it.
    """
    text = answer.rpartition(_QA_ANSWER)[2]
    if text in expected:
        return 100.0
    plain = _plain(text)
    return 100.0 if any(_plain(alternative) in plain for alternative in expected.split("|")) else 0.0


def _plain(text: str) -> str:
    return re.sub(r"\s+", "", text).lower()


Row = Mapping[str, str]
_ROUNDED = 0.1  # tokens per sample: mpillm rounds to this
_EVALUATED = re.compile(r"^Total samples evaluated: (\d{1,9})$", re.MULTILINE)  # gpt-oss-120b's evaluator


@dataclass(frozen=True, slots=True)
class ScoredResponse:
    """One sample's answer."""

    text: str  # decoded, without special tokens
    n_tokens: int  # as logged, with the end token


@dataclass(frozen=True)
class Scores:
    """The scores of a run."""

    values: dict[str, float]  # by the references' names
    notes: list[str] = field(default_factory=list)  # for the user
    completions: list[dict[str, str]] = field(default_factory=list)  # code to execute (MBXP)


@dataclass(frozen=True)
class Check:
    """A score and its bounds; `value` is None if there is no score."""

    name: str
    value: float | None
    min_value: float
    max_value: float | None = None

    @property
    def passed(self) -> bool:
        return (
            self.value is not None
            and self.value >= self.min_value
            and (self.max_value is None or self.value <= self.max_value)
        )

    def text(self) -> str:
        """Format the check: "rouge1 20.10 (at least 44.43)"."""
        bounds = f"at least {self.min_value:.2f}"
        bounds += f", at most {self.max_value:.2f}" if self.max_value is not None else ""
        return f"{self.name} {'missing' if self.value is None else f'{self.value:.2f}'} ({bounds})"


def check(accuracy: Accuracy, values: dict[str, float], accuracy_target: float) -> list[Check]:
    """Compare scores with the targets. `accuracy_target`: a fraction of the reference, 0.99 or 0.999."""
    checks = [
        Check(name, values.get(name), reference * accuracy_target)
        for name, reference in accuracy.references.items()
    ]
    return [*checks, Check(accuracy.length, values.get(accuracy.length), *accuracy.bounds)]


def by_rouge(answers: Sequence[ScoredResponse], rows: Sequence[Row]) -> Scores:
    """Score answers by ROUGE against the data set's references."""
    values, length, notes = _rouge([answer.text for answer in answers], [row["output"] for row in rows])
    return Scores(values | _lengths(answers, length), notes)


def openorca_gsm8k_mbxp(answers: Sequence[ScoredResponse], rows: Sequence[Row]) -> Scores:
    """Score OpenOrca's samples by ROUGE, GSM8K's by exact match.

    The reference's container scores MBXP's samples by executing the model's code in six languages.
    `Scores.completions` is the input of its `evaluate_mbxp`; see `pass_at_1`.
    """
    orca = [i for i, row in enumerate(rows) if row["dataset"] == "OpenOrca"]
    math = [i for i, row in enumerate(rows) if row["dataset"] == "GSM8K"]
    code = [i for i, row in enumerate(rows) if row["dataset"] not in ("OpenOrca", "GSM8K")]
    values, length, notes = (
        _rouge([answers[i].text for i in orca], [rows[i]["gt_output"] for i in orca]) if orca else ({}, 0, [])
    )
    if math:
        values["gsm8k"] = 100.0 * sum(gsm8k(answers[i].text, rows[i]["gt_output"]) for i in math) / len(math)
    completions = []
    for i in code:
        language, _, entry_point = rows[i]["id"].partition("_")
        completions.append(
            {
                "lang": language,
                "prompt": rows[i]["input"],
                "test_code": rows[i]["gt_output"],
                "entry_point": entry_point,
                "response": answers[i].text,
            }
        )
    return Scores(values | _lengths(answers, length), notes, completions)


def long_context(answers: Sequence[ScoredResponse], rows: Sequence[Row]) -> Scores:
    """Score each sample by its metric: ROUGE-L, needle in a haystack, or question answering."""
    split, trained = rouge.splitter()
    texts = rouge.as_lines([answer.text for answer in answers], split)
    targets = rouge.as_lines([row["gt_output"] for row in rows], split)
    summaries = [i for i, row in enumerate(rows) if row["metric"] == "rouge"]
    by_name: dict[str, list[float]] = {"exact_match": [], "rougeL": []}
    by_name["rougeL"] = [
        score["rougeL"]
        for score in rouge.scores(["rougeL"], [texts[i] for i in summaries], [targets[i] for i in summaries])
    ]
    for i, row in enumerate(rows):
        if row["metric"] != "rouge" and row["metric"] not in _MATCHES:
            known = ", ".join(_MATCHES)
            raise ConfigError(
                f"the data set has a sample with metric '{row['metric']}': not one of rouge, {known}"
            )
        if row["metric"] != "rouge":
            by_name["exact_match"].append(_MATCHES[row["metric"]](texts[i], targets[i]))
    values = {name: sum(scores) / len(scores) for name, scores in by_name.items() if scores}
    return Scores(values | _lengths(answers, sum(map(len, texts))), _untrained(trained))


_MATCHES: dict[str, Callable[[str, str], float]] = {"niah_em": needle, "qa_em": question}


def by_reference(answers: Sequence[ScoredResponse], rows: Sequence[Row]) -> Scores:
    """Return the answers' lengths. The reference's evaluator, which executes code of the model, computes the
    scores (`reference_scores`)."""
    return Scores(_lengths(answers, 0))


def printed_scores(text: str) -> dict[str, float]:
    """Return all scores in an evaluator's output, such as ``'rouge1': 44.43`` or ``'rouge1': '44.43'``."""
    matches = re.findall(r"'([\w-]+)':\s*'?(\d+(?:\.\d+)?)", text)
    return {name: score for name, text in matches if isfinite(score := float(text))}


def reference_scores(names: Iterable[str], printed: str, lengths: Mapping[str, float]) -> dict[str, float]:
    """Return the named scores from the output of the reference's evaluator, ``'exact_match': 81.36``.

    Raises ConfigError if one is missing, or the number or length of the answers differs.
    """
    scores = printed_scores(printed)
    if missing := [name for name in names if name not in scores]:
        raise ConfigError(f"no '{missing[0]}': <number> in it: is it the evaluator's output?")
    if counts := _EVALUATED.findall(printed):
        scores["num-samples"] = float(counts[-1])
    for name, own_name in (("num-samples", "gen_num"), ("tokens_per_sample", "tokens_per_sample")):
        if name in scores and abs(scores[name] - lengths[own_name]) > _ROUNDED:
            raise ConfigError(
                f"its {name} is {scores[name]:g}, this run's {lengths[own_name]:g}: of another run?"
            )
    return {name: scores[name] for name in names}


METRICS: dict[Metric, Callable[[Sequence[ScoredResponse], Sequence[Row]], Scores]] = {
    "rouge": by_rouge,
    "openorca_gsm8k_mbxp": openorca_gsm8k_mbxp,
    "long_context": long_context,
    "by_reference": by_reference,
}


def pass_at_1(completions: Sequence[Mapping[str, str]], evaluated: Mapping[str, Any]) -> float:
    """Return the percentage of completions that passed, from `evaluate_mbxp`'s ``evaluated_test.json``.

    Completions in languages that the reference skips do not count. Raises KeyError if one is missing.
    """
    counted = [c for c in completions if c["lang"] in MBXP_LANGUAGES]
    passed = [bool(evaluated[f"{c['lang']}_{c['entry_point']}"]["passed"]) for c in counted]
    return 100.0 * sum(passed) / len(counted)


MBXP_LANGUAGES = ("cpp", "python", "php", "javascript", "ruby", "typescript")


def _rouge(texts: Sequence[str], targets: Sequence[str]) -> tuple[dict[str, float], int, list[str]]:
    """Return the ROUGE means, the number of characters of the answers, and notes."""
    split, trained = rouge.splitter()
    lines = rouge.as_lines(texts, split)
    scores = rouge.scores(rouge.TYPES, lines, rouge.as_lines(targets, split))
    means = {name: round(sum(score[name] for score in scores) / len(scores), 4) for name in rouge.TYPES}
    return means, sum(map(len, lines)), _untrained(trained)


def _untrained(trained: bool) -> list[str]:
    if trained:
        return []
    return [
        "rougeLsum and gen_len: sentences split without nltk's English data "
        "(python -m nltk.downloader punkt_tab)"
    ]


def _lengths(answers: Sequence[ScoredResponse], characters: int) -> dict[str, float]:
    tokens = sum(answer.n_tokens for answer in answers)
    return {
        "gen_len": characters,
        "gen_num": len(answers),
        "gen_tok_len": tokens,
        "tokens_per_sample": round(tokens / len(answers), 1),
    }
