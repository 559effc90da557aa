"""Latency limits of a command line: ``--goodput ttft:500 tpot:50``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from disagg.errors import nearest
from mpillm.options.field import Reason
from mpillm.options.parsers import expects, not_negative

# Names of vLLM (`vllm bench serve --goodput`) and AIPerf (`aiperf profile --goodput`), with mpillm's names.
NAMES = {
    "ttft": "ttft",
    "tpot": "tpot",
    "e2el": "e2el",
    "time_to_first_token": "ttft",
    "inter_token_latency": "tpot",
    "request_latency": "e2el",
}
NO_LIMIT_MS = 10**9


class _JoinValues(argparse.Action):
    """Joins an option's values: limits are several arguments in vLLM, one argument with blanks in AIPerf."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, " ".join(values))


ARGPARSE_OPTIONS = {"nargs": "+", "action": _JoinValues, "metavar": "NAME:MS"}
"""`argparse_opts` of a field of limits."""


def _text(value: Any) -> str:
    """Return limits as text for the parsers."""
    if isinstance(value, dict):
        return ",".join(f"{name}:{limit:.12g}" for name, limit in value.items())
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _parser(is_integer: bool) -> Callable[[str], dict[str, float]]:
    unit = "whole milliseconds, at least 1" if is_integer else "milliseconds"

    @expects(f"limits in {unit}, such as ttft:500 tpot:50 e2el:9000", _text)
    def limits(text: str) -> dict[str, float]:
        limits_by_name: dict[str, float] = {}
        for pair in text.replace(",", " ").split():
            name, _, number = pair.partition(":")
            if name not in NAMES:
                raise Reason(f"no latency {name!r}{nearest(name, NAMES)}: {', '.join(NAMES)}")
            value = not_negative(number)
            if not 0 < value < NO_LIMIT_MS or (is_integer and value != int(value)):
                raise ValueError(pair)
            if limits_by_name.setdefault(NAMES[name], value) != value:
                raise Reason(f"{NAMES[name]} has two limits")
        if not limits_by_name:
            raise ValueError(text)
        return limits_by_name

    return limits


limits_ms = _parser(is_integer=False)
"""Return limits in milliseconds by ``ttft``, ``tpot``, ``e2el``."""
integer_limits_ms = _parser(is_integer=True)
"""Return limits as `limits_ms` does, in whole milliseconds, which LoadGen requires."""
