"""Latency limits that a caller names: ``--goodput ttft:500 tpot:50``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from disagg.errors import nearest
from mpillm.options.field import Reason
from mpillm.options.parsers import expects, not_negative

# vLLM's names (`vllm bench serve --goodput`), AIPerf's (`aiperf profile --goodput`), and what they are here.
NAMES = {
    "ttft": "ttft",
    "tpot": "tpot",
    "e2el": "e2el",
    "time_to_first_token": "ttft",
    "inter_token_latency": "tpot",
    "request_latency": "e2el",
}
NO_LIMIT_MS = 10**9


class Words(argparse.Action):
    """Makes one text of an option's words: vLLM's limits are several words, AIPerf's one with blanks."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, " ".join(values))


WORDS = {"nargs": "+", "action": Words, "metavar": "NAME:MS"}
"""Options of argparse for a field of limits."""


def _text(value: Any) -> str:
    """Return limits as the parsers read them, in one word."""
    if isinstance(value, dict):
        return ",".join(f"{name}:{limit:.12g}" for name, limit in value.items())
    return (
        " ".join(map(str, value))
        if isinstance(value, Sequence) and not isinstance(value, str)
        else str(value)
    )


def _parser(whole: bool) -> Callable[[str], dict[str, float]]:
    least = "whole milliseconds, at least 1" if whole else "milliseconds"

    @expects(f"limits in {least}, as ttft:500 tpot:50 e2el:9000", _text)
    def limits(text: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for pair in text.replace(",", " ").split():
            name, _, number = pair.partition(":")
            if name not in NAMES:
                raise Reason(f"no latency {name!r}{nearest(name, NAMES)}: {', '.join(NAMES)}")
            value = not_negative(number)
            if not 0 < value < NO_LIMIT_MS or (whole and value != int(value)):
                raise ValueError(pair)
            if found.setdefault(NAMES[name], value) != value:
                raise Reason(f"{NAMES[name]} has two limits")
        if not found:
            raise ValueError(text)
        return found

    return limits


limits_ms = _parser(whole=False)
"""Return limits in milliseconds by ``ttft``, ``tpot``, ``e2el``."""
whole_limits_ms = _parser(whole=True)
"""As `limits_ms`, in whole milliseconds, as LoadGen wants them."""
