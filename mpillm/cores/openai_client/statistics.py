"""Latencies of a test's answers at a client's sockets."""

from __future__ import annotations

import itertools

import numpy as np

from mpillm.cores.histogram import Histogram
from mpillm.cores.openai_client.call import Call

_FEW = 1024  # latencies that are counted together


class Statistics:
    """Latencies of a test; written on the client's thread."""

    def __init__(self) -> None:
        self._names = ("socket_ttft", "socket_first_answer", "socket_tpot", "socket_itl")
        self._waiting: dict[str, list[float]] = {name: [] for name in self._names}
        self._histograms = {name: Histogram() for name in self._names}

    def add(self, call: Call, n_tokens: int) -> None:
        """Count an answer's latencies at the socket."""
        times = call.answer.times
        self._add("socket_ttft", [times[0] - call.sent_at])
        if call.answer.first_content is not None:  # of a chat: after the reasoning
            self._add("socket_first_answer", [call.answer.first_content - call.sent_at])
        if n_tokens > 1 and len(times) > 1:
            self._add("socket_tpot", [(times[-1] - times[0]) / (n_tokens - 1)])
            self._add("socket_itl", [after - before for before, after in itertools.pairwise(times)])

    def _add(self, name: str, seconds: list[float]) -> None:
        waiting = self._waiting[name]
        waiting += seconds
        if len(waiting) >= _FEW:
            self._histograms[name].add(np.array(waiting))
            waiting.clear()

    def values(self) -> dict[str, float]:
        """Return percentiles in milliseconds."""
        result: dict[str, float] = {}
        for name in self._names:
            self._add_all(name)
            for key, value in (self._histograms[name].summary_ms() or {}).items():
                result[f"{name}_{key}_ms"] = value
        return result

    def _add_all(self, name: str) -> None:
        if self._waiting[name]:
            self._histograms[name].add(np.array(self._waiting[name]))
            self._waiting[name] = []
