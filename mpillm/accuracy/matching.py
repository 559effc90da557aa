"""Scores that compare an answer with what was expected, without a library.

They follow the accuracy scripts of mlcommons/inference to the letter, quirks included, because the reference values were made with those:
language/mixtral-8x7b (GSM8K) and language/llama3.1-405b (needle in a haystack, question answering).
"""

from __future__ import annotations

import re

_NUMBER = re.compile(r"-?[\d,]*\.?\d+")
_UUID = re.compile(r"\w{8}-\w{4}-\w{4}-\w{4}-\w{12}")
_GSM8K_ANSWER = "The answer is"
_GSM8K_NEXT = "\nQ:"  # where a model goes on with a question of its own
_QA_ANSWER = "Answer: "


def gsm8k(answer: str, expected: str) -> bool:
    """Whether the answer's number is the expected one: the first after the last ``The answer is``, else the last one in the text."""
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
    """Percent: UUIDs of the answer against those expected, in their order.

    As in the reference, a UUID's share is that of the expected one's characters which occur anywhere in it.
    """
    found, wanted = _UUID.findall(answer), _UUID.findall(expected)
    if not found:
        return 0.0
    shares = [sum(c.lower() in f.lower() for c in w) / len(w) for f, w in zip(found, wanted, strict=False)]
    return round(sum(shares) / len(found) * 100, 2)


def question(answer: str, expected: str) -> float:
    """100 or 0: whether what follows the last ``Answer: `` is part of, or holds one of, the alternatives between the bars of `expected`."""
    text = answer.rpartition(_QA_ANSWER)[2]
    if text in expected:
        return 100.0
    plain = _plain(text)
    return 100.0 if any(_plain(alternative) in plain for alternative in expected.split("|")) else 0.0


def _plain(text: str) -> str:
    return re.sub(r"\s+", "", text).lower()
