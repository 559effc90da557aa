"""The metrics of `/metrics`: vLLM's names, under `mpillm:`. Counted in the HTTP thread."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from mpillm.endpoint.open_requests import PendingResponse
from mpillm.roles.harness import Totals

if TYPE_CHECKING:
    from mpillm.endpoint.disagg.routes import DisaggRoutes


def _bounds(text: str) -> tuple[float, ...]:
    return tuple(float(number) for number in text.split())


# vLLM's bounds, in seconds.
FIRST_TOKEN_S = _bounds("0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160")
_TOKEN_S = _bounds("0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80")
REQUEST_S = _bounds("0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920")
_TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))


class BucketHistogram:
    """Counts of values, by upper bounds."""

    def __init__(self, help_: str, bounds: Sequence[float]) -> None:
        self.help = help_
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def lines(self, name: str, label: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{label},le="{"+Inf" if bound == float("inf") else float(bound)}"}} {total}'
        yield f"{name}_sum{{{label}}} {self._sum!r}"
        yield f"{name}_count{{{label}}} {total}"


class TokenGaps:
    """Counts the gaps between the tokens of an answer that is read in pieces.

    Tokens that arrive together have equal gaps, whatever the pieces in which they are read.
    """

    def __init__(self, histogram: BucketHistogram, answer: PendingResponse) -> None:
        self._histogram = histogram
        self._answer = answer
        self._n_read = 0
        self._last_at = self._gap_s = 0.0

    def add(self, n: int) -> None:
        """Count the gaps before the next `n` tokens of the answer."""
        answer, is_first = self._answer, self._n_read == 0
        if answer.last_at != self._last_at:  # tokens have arrived
            n_gaps = len(answer.tokens) - self._n_read - is_first
            self._gap_s = (answer.last_at - (self._last_at or answer.first_at)) / max(1, n_gaps)
            self._last_at = answer.last_at
        self._n_read += n
        if n > is_first:
            self._histogram.add(self._gap_s, n - is_first)


TEXT = "text/plain; version=0.0.4; charset=utf-8"
"""The content type."""


class ServeMetrics:
    """Counts since the start; of constant size. `totals` is for `result.json`."""

    def __init__(self, counts_cached: bool = False) -> None:
        """`counts_cached`: the instances report the cached tokens of all prompts."""
        self.totals = Totals()
        self._counts_cached = counts_cached
        self._queried_tokens = self._cached_tokens = 0
        self._finished = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._prompt_tokens = self._generated_tokens = 0
        self._responses: dict[int, int] = {}  # by HTTP status
        self._histograms = {
            "time_to_first_token_seconds": BucketHistogram("Time to the first token", FIRST_TOKEN_S),
            "inter_token_latency_seconds": BucketHistogram("Time between two tokens", _TOKEN_S),
            "request_time_per_output_token_seconds": BucketHistogram(
                "Mean time between two tokens of a request", _TOKEN_S
            ),
            "e2e_request_latency_seconds": BucketHistogram("Time to the last token", REQUEST_S),
            "request_prompt_tokens": BucketHistogram("Prompt tokens of a request", _TOKENS),
            "request_generation_tokens": BucketHistogram("Tokens of an answer", _TOKENS),
        }

    def responded(self, status: int) -> None:
        self._responses[status] = self._responses.get(status, 0) + 1

    def first_token(self, answer: PendingResponse) -> None:
        seconds = answer.first_at - answer.opened_at
        self._histograms["time_to_first_token_seconds"].add(seconds)
        self.totals.ttft.add_one(seconds)
        self._prompt_tokens += answer.n_prompt
        if answer.cached is not None:
            self._queried_tokens += answer.n_prompt
            self._cached_tokens += answer.cached

    def token_gaps(self, answer: PendingResponse) -> TokenGaps:
        return TokenGaps(self._histograms["inter_token_latency_seconds"], answer)

    def finished(self, answer: PendingResponse, reason: str, n_tokens: int) -> None:
        """Count a request that has ended; `n_tokens`: tokens that the client got.

        `reason`: stop, length, abort (the client has left), error.
        """
        self._finished[reason] += 1
        self._generated_tokens += n_tokens
        totals = self.totals
        totals.samples += reason in ("stop", "length")
        totals.errors += reason == "error"
        totals.tokens += n_tokens
        totals.ended = max(totals.ended, answer.last_at)
        self._histograms["request_prompt_tokens"].add(answer.n_prompt)
        self._histograms["request_generation_tokens"].add(n_tokens)
        if reason in ("stop", "length"):
            latency = answer.last_at - answer.opened_at
            self._histograms["e2e_request_latency_seconds"].add(latency)
            totals.latency.add_one(latency)
            if n_tokens > 1:
                seconds = (answer.last_at - answer.first_at) / (n_tokens - 1)
                self._histograms["request_time_per_output_token_seconds"].add(seconds)
                totals.tpot.add_one(seconds)

    @property
    def aborted(self) -> int:
        return self._finished["abort"]

    def text(self, model: str, gauges: Mapping[str, float], fetches: DisaggRoutes | None) -> str:
        """Return Prometheus' text format, version 0.0.4.

        `gauges`: current values by name; `fetches`: counts the KV caches that a generation server fetches.
        """
        label = f'model_name="{escaped(model)}"'
        lines = []
        for name, value in gauges.items():
            lines += [*head(name, _GAUGES[name], "gauge"), f"mpillm:{name}{{{label}}} {value!r}"]
        counts = [
            ("prompt_tokens_total", "Prompt tokens of requests that got a token", self._prompt_tokens),
            ("generation_tokens_total", "Tokens of answers that have ended", self._generated_tokens),
        ]
        if self._counts_cached:
            queried = "Prompt tokens that were looked up in a KV cache"
            cached = "Prompt tokens that were in a KV cache already"
            counts += [
                ("prefix_cache_queries_total", queried, self._queried_tokens),
                ("prefix_cache_hits_total", cached, self._cached_tokens),
            ]
        if fetches is not None:
            counts += [
                ("kv_transfers_total", "KV caches fetched from context servers", fetches.transfers),
                ("kv_failed_transfers_total", "KV caches that could not be", fetches.failed_transfers),
            ]
        for name, help_, count in counts:
            lines += [*head(name, help_, "counter"), f"mpillm:{name}{{{label}}} {count}"]
        lines += head("request_success_total", "Requests that have ended", "counter")
        lines += [
            f'mpillm:request_success_total{{{label},finished_reason="{reason}"}} {n}'
            for reason, n in self._finished.items()
        ]
        lines += head("http_responses_total", "HTTP responses", "counter")
        lines += [
            f'mpillm:http_responses_total{{{label},status="{status}"}} {n}'
            for status, n in sorted(self._responses.items())
        ]
        for name, histogram in self._histograms.items():
            lines += [*head(name, histogram.help, "histogram"), *histogram.lines(f"mpillm:{name}", label)]
        return "\n".join(lines) + "\n"


_GAUGES = {
    "num_requests_running": "Requests with a first token, and not the last",
    "num_requests_waiting": "Requests without a first token",
    "instances_lost": "Instances that are lost, without which the server goes on",
    "requests_retried": "Requests that were computed again because an instance was lost",
    "kv_cache_usage_perc": "Use of the fullest instance's KV cache, 0 to 1",
}


def head(name: str, help_: str, kind: str) -> list[str]:
    """Return the lines before a metric's values."""
    return [f"# HELP mpillm:{name} {help_}.", f"# TYPE mpillm:{name} {kind}"]


def escaped(text: str) -> str:
    """Return `text` as the value of a label."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
