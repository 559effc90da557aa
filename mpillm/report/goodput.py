"""Latency limits that a caller names: ``--goodput ttft:500 tpot:50``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError, about, nearest
from mpillm.report.request_log import read_requests, tpot_s

# vLLM's names (`vllm bench serve --goodput`), AIPerf's (`aiperf profile --goodput`), and what they are here.
NAMES = {
    "ttft": "ttft",
    "tpot": "tpot",
    "e2el": "e2el",
    "time_to_first_token": "ttft",
    "inter_token_latency": "tpot",
    "request_latency": "e2el",
}
_SECONDS: dict[str, Callable[[NDArray[np.void]], NDArray[Any]]] = {
    "ttft": lambda rows: rows["ttft"],
    "tpot": tpot_s,
    "e2el": lambda rows: rows["latency"],
}
NO_LIMIT_MS = 10**9


def take_goodput(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split off the words of --goodput: vLLM's are several words, AIPerf's one with blanks."""
    kept: list[str] = []
    limits: list[str] = []
    taking = False
    for word in argv:
        name, equals, value = word.partition("=")
        if name == "--goodput":
            taking = not equals
            limits += [value] if equals else []
        elif taking and not word.startswith("-"):
            limits.append(word)
        else:
            taking = False
            kept.append(word)
    if any(word.partition("=")[0] == "--goodput" for word in argv) and not limits:
        raise ConfigError("--goodput: expected limits, as ttft:500 tpot:50")
    return kept, limits


@about("goodput")
def parse_goodput(words: Sequence[str], whole: bool = True) -> dict[str, float]:
    """Return limits in milliseconds by ``ttft``, ``tpot``, ``e2el``.

    `words`: ``NAME:MILLISECONDS`` each, or several in one word, as AIPerf takes them.
    `whole`: as LoadGen wants them. Raises ConfigError.
    """
    limits: dict[str, float] = {}
    for pair in " ".join(words).replace(",", " ").split():
        name, _, text = pair.partition(":")
        if name not in NAMES:
            raise ConfigError(
                f"--goodput {pair}: no latency {name!r}{nearest(name, NAMES)}: {', '.join(NAMES)}"
            )
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if whole and not (1 <= value < NO_LIMIT_MS and value == int(value)):
            raise ConfigError(f"--goodput {pair}: expected {name}:MILLISECONDS, a whole number of at least 1")
        if not 0 < value < NO_LIMIT_MS:
            raise ConfigError(f"--goodput {pair}: expected {name}:MILLISECONDS")
        if limits.setdefault(NAMES[name], value) != value:
            raise ConfigError(f"--goodput {pair}: {NAMES[name]} has two limits")
    return limits


def late(rows: NDArray[np.void], limits: Mapping[str, float]) -> dict[str, int]:
    """Return how many requests of a run's records were over each limit, in milliseconds."""
    return {name: int((_SECONDS[name](rows) > limit / 1e3).sum()) for name, limit in limits.items()}


def good_per_second(folder: Path, limits: Mapping[str, float], seconds: float) -> float:
    """Return vLLM's goodput: requests per second that met all limits."""
    rows = read_requests(folder)
    good = rows["error"] == 0
    for name, limit in limits.items():
        good &= ~(_SECONDS[name](rows) > limit / 1e3)
    return float(good.sum()) / seconds if seconds > 0 else 0.0
