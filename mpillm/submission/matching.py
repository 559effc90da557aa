"""Scores that compare an answer with the expected one, without a library.

They follow the accuracy scripts of mlcommons/inference exactly, quirks included, because the reference values
were computed with those: language/mixtral-8x7b (GSM8K) and language/llama3.1-405b (needle in a haystack,
question answering).
"""

from __future__ import annotations

import re

_NUMBER = re.compile(r"-?[\d,]*\.?\d+")
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
