"""ROUGE as in mlcommons/inference's accuracy scripts: F-measures of `rouge-score` with stemming."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import Any

from disagg.errors import ConfigError

TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")
_CHUNK = 64  # pairs that a process scores in one task: at most a few seconds


def need_libraries() -> None:
    """Raise ConfigError if the optional packages are not installed."""
    try:
        import nltk  # noqa: F401
        import rouge_score  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"ROUGE needs {error.name}: pip install 'mpillm[accuracy]'") from error


def splitter() -> tuple[Callable[[str], list[str]], bool]:
    """Return a function that splits a text into sentences, and whether it is nltk's trained splitter.

    MLCommons' scripts use the trained splitter, which nltk downloads separately (`python -m nltk.downloader
    punkt_tab`). The untrained one treats abbreviations as ends of sentences, so rougeLsum and gen_len differ
    slightly.
    """
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab/english/")
    except LookupError:
        untrained = nltk.tokenize.punkt.PunktSentenceTokenizer()
        return untrained.tokenize, False
    return nltk.sent_tokenize, True


def as_lines(texts: Sequence[str], split: Callable[[str], list[str]]) -> list[str]:
    """Return texts for rougeLsum: stripped, with one sentence per line."""
    return ["\n".join(split(text.strip())) for text in texts]


def scores(
    types: Sequence[str], predictions: Sequence[str], targets: Sequence[str]
) -> list[dict[str, float]]:
    """Return the F-measure times 100 of each pair and ROUGE type. Uses all CPU cores."""
    pairs = [
        (tuple(types), prediction, target) for prediction, target in zip(predictions, targets, strict=True)
    ]
    processes = min(len(os.sched_getaffinity(0)), -(-len(pairs) // _CHUNK))
    if processes <= 1:
        return [_score(pair) for pair in pairs]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(_score, pairs, chunksize=_CHUNK))


@cache
def _scorer(types: tuple[str, ...]) -> Any:
    from rouge_score import rouge_scorer

    return rouge_scorer.RougeScorer(list(types), use_stemmer=True)


def _score(pair: tuple[tuple[str, ...], str, str]) -> dict[str, float]:
    types, prediction, target = pair
    score = _scorer(types).score(target, prediction)
    return {name: 100 * score[name].fmeasure for name in types}
