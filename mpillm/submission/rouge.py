"""ROUGE as mlcommons/inference's accuracy scripts compute it: `rouge-score` with stemming, F-measures."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import Any

from disagg.errors import ConfigError

TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")
_CHUNK = 64  # pairs that a process scores at a time: a few seconds of work at most


def need_libraries() -> None:
    """Raise ConfigError if the optional packages are not installed."""
    try:
        import nltk  # noqa: F401
        import rouge_score  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"ROUGE needs {error.name}: pip install 'mpillm[accuracy]'") from error


def splitter() -> tuple[Callable[[str], list[str]], bool]:
    """Return a function from a text to its sentences, and whether it is the references': nltk's for English.

    nltk downloads the trained one separately (`python -m nltk.downloader punkt_tab`). Without it nltk's
    algorithm runs untrained and takes abbreviations for ends of sentences. rougeLsum and gen_len
    differ slightly.
    """
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab/english/")
    except LookupError:
        untrained = nltk.tokenize.punkt.PunktSentenceTokenizer()
        return untrained.tokenize, False
    return nltk.sent_tokenize, True


def as_lines(texts: Sequence[str], split: Callable[[str], list[str]]) -> list[str]:
    """Return texts as rougeLsum needs them: stripped, one sentence per line."""
    return ["\n".join(split(text.strip())) for text in texts]


def scores(
    types: Sequence[str], predictions: Sequence[str], targets: Sequence[str]
) -> list[dict[str, float]]:
    """Return the F-measure times 100 of each pair and ROUGE type. Uses all cores."""
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
    found = _scorer(types).score(target, prediction)
    return {name: 100 * found[name].fmeasure for name in types}
