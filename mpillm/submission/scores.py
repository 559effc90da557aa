"""The scores of a run, from decoded answers and the rows of the data set.

Names and rounding are those that the reference scripts of mlcommons/inference print
(language/<workload>/evaluate-accuracy.py), because the submission checker looks for them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from disagg.errors import ConfigError
from mpillm.submission import rouge
from mpillm.workloads.workload import Metric

_NUMBER = re.compile(r"(?:-|(?<!,))[\d,]*\.?\d+")
_UUID = re.compile(r"\w{8}-\w{4}-\w{4}-\w{4}-\w{12}")
_GSM8K_ANSWER = "The answer is"
_GSM8K_NEXT = "\nQ:"  # where a model continues with a question of its own
_QA_ANSWER = "Answer: "


def gsm8k(answer: str, expected: str) -> bool:
    """Compare the answer's number: the first after the last ``The answer is``, else the text's last."""
    text = answer.split(_GSM8K_NEXT)[0]
    _, marker, tail = text.rpartition(_GSM8K_ANSWER)
    numbers = _NUMBER.findall(tail)[:1] if marker else []
    numbers = numbers or _NUMBER.findall(text)[-1:]
    found = _float(numbers[0].replace(",", "")) if numbers else None
    return found is not None and found == _float(expected)


def _float(text: str) -> float | None:
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def needle(answer: str, expected: str) -> float:
    """Score the answer's UUIDs against the expected ones, in order, in percent.

    As in the reference, a UUID scores the share of the expected one's characters that occur anywhere in it.
    """
    found, wanted = _UUID.findall(answer), _UUID.findall(expected)
    if not found:
        return 0.0
    shares = [sum(c.lower() in f.lower() for c in w) / len(w) for f, w in zip(found, wanted, strict=False)]
    return round(sum(shares) / len(found) * 100, 2)


def question(answer: str, expected: str) -> float:
    """Score 100 or 0: does the text after the last ``Answer: `` match an alternative?

    `expected` separates the alternatives with bars; one matches if it contains the text or is part of it.
    """
    text = answer.rpartition(_QA_ANSWER)[2]
    if text in expected:
        return 100.0
    plain = _plain(text)
    return 100.0 if any(_plain(alternative) in plain for alternative in expected.split("|")) else 0.0


def _plain(text: str) -> str:
    return re.sub(r"\s+", "", text).lower()


Row = Mapping[str, str]
_ROUNDED = 0.1  # tokens per sample: ours are rounded to this


@dataclass(frozen=True, slots=True)
class Answer:
    """One sample's answer."""

    text: str  # decoded, without special tokens
    n_tokens: int  # as logged, with the end token


@dataclass(frozen=True)
class Scores:
    """The scores of a run."""

    values: dict[str, float]  # by the references' names
    notes: list[str] = field(default_factory=list)  # what a reader must know about them
    completions: list[dict[str, str]] = field(default_factory=list)  # code still to be executed (MBXP)


def by_rouge(answers: Sequence[Answer], rows: Sequence[Row]) -> Scores:
    """Score answers by ROUGE against the data set's."""
    values, length, notes = _rouge([answer.text for answer in answers], [row["output"] for row in rows])
    return Scores(values | _lengths(answers, length), notes)


def openorca_gsm8k_mbxp(answers: Sequence[Answer], rows: Sequence[Row]) -> Scores:
    """Score OpenOrca's samples by ROUGE, GSM8K's by exact match.

    MBXP's samples are scored by executing what the model wrote, in six languages. The reference's container
    does that (`Scores.completions` is the input of its `evaluate_mbxp`); see `pass_at_1`.
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


def long_context(answers: Sequence[Answer], rows: Sequence[Row]) -> Scores:
    """Return each sample by its metric: ROUGE-L, needle in a haystack, or question answering."""
    split, trained = rouge.splitter()
    texts = rouge.as_lines([answer.text for answer in answers], split)
    targets = rouge.as_lines([row["gt_output"] for row in rows], split)
    summaries = [i for i, row in enumerate(rows) if row["metric"] == "rouge"]
    found: dict[str, list[float]] = {"exact_match": [], "rougeL": []}
    found["rougeL"] = [
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
            found["exact_match"].append(_MATCHES[row["metric"]](texts[i], targets[i]))
    values = {name: sum(scores) / len(scores) for name, scores in found.items() if scores}
    return Scores(values | _lengths(answers, sum(map(len, texts))), _untrained(trained))


_MATCHES: dict[str, Callable[[str, str], float]] = {"niah_em": needle, "qa_em": question}


def by_reference(answers: Sequence[Answer], rows: Sequence[Row]) -> Scores:
    """Return the answers' lengths. The scores are the reference's evaluator's, which executes code that
    the model wrote (`reference_scores`)."""
    return Scores(_lengths(answers, 0))


def printed_scores(text: str) -> dict[str, float]:
    """Return all scores of a text as evaluators print them: ``'rouge1': 44.43`` or ``'rouge1': '44.43'``."""
    found = re.findall(r"'([\w-]+)':\s*'?(\d+(?:\.\d+)?)", text)
    return {name: score for name, text in found if isfinite(score := float(text))}


def reference_scores(names: Iterable[str], printed: str, lengths: Mapping[str, float]) -> dict[str, float]:
    """Return the scores of these names from what the reference's evaluator printed: ``'exact_match': 81.36``.

    Raises ConfigError if one is not there, or the text is about answers of another number or length.
    """
    said = printed_scores(printed)
    if missing := [name for name in names if name not in said]:
        raise ConfigError(f"no '{missing[0]}': <number> in it: is it what the evaluator printed?")
    for theirs, ours in (("num-samples", "gen_num"), ("tokens_per_sample", "tokens_per_sample")):
        if theirs in said and abs(said[theirs] - lengths[ours]) > _ROUNDED:
            raise ConfigError(
                f"its {theirs} is {said[theirs]:g}, this run's {lengths[ours]:g}: of another run?"
            )
    return {name: said[name] for name in names}


METRICS: dict[Metric, Callable[[Sequence[Answer], Sequence[Row]], Scores]] = {
    "rouge": by_rouge,
    "openorca_gsm8k_mbxp": openorca_gsm8k_mbxp,
    "long_context": long_context,
    "by_reference": by_reference,
}


def pass_at_1(completions: Sequence[Mapping[str, str]], evaluated: Mapping[str, Any]) -> float:
    """Return the percentage of completions that passed, from `evaluate_mbxp`'s ``evaluated_test.json``.

    Raises KeyError if a completion was not evaluated. Completions in languages that the reference skips do
    not count.
    """
    counted = [c for c in completions if c["lang"] in MBXP_LANGUAGES]
    return (
        100.0
        * sum(bool(evaluated[f"{c['lang']}_{c['entry_point']}"]["passed"]) for c in counted)
        / len(counted)
    )


MBXP_LANGUAGES = ("cpp", "python", "php", "javascript", "ruby", "typescript")


def _rouge(texts: Sequence[str], targets: Sequence[str]) -> tuple[dict[str, float], int, list[str]]:
    """Return ROUGE means, characters of the answers, and notes."""
    split, trained = rouge.splitter()
    lines = rouge.as_lines(texts, split)
    found = rouge.scores(rouge.TYPES, lines, rouge.as_lines(targets, split))
    means = {name: round(sum(score[name] for score in found) / len(found), 4) for name in rouge.TYPES}
    return means, sum(map(len, lines)), _untrained(trained)


def _untrained(trained: bool) -> list[str]:
    if trained:
        return []
    return [
        "rougeLsum and gen_len: sentences split without nltk's English data "
        "(python -m nltk.downloader punkt_tab)"
    ]


def _lengths(answers: Sequence[Answer], characters: int) -> dict[str, float]:
    tokens = sum(answer.n_tokens for answer in answers)
    return {
        "gen_len": characters,
        "gen_num": len(answers),
        "gen_tok_len": tokens,
        "tokens_per_sample": round(tokens / len(answers), 1),
    }
