"""What `/metrics` of a disaggregated leader says: its answers, and the servers that it fronts.

Names that `serve` has, too, mean the same there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mpillm.endpoint.prometheus import FIRST_TOKEN_S, REQUEST_S, Histogram, escaped, head
from mpillm.endpoint.workers import Worker

_LABEL = 'server_role="leader"'
_SERVERS = (
    ("server_up", "Whether the server answers", "gauge"),
    ("server_requests_running", "Requests at the server", "gauge"),
    ("server_requests_total", "Requests placed at the server, refused ones too", "counter"),
)


class LeaderMetrics:
    """Counts since the start."""

    def __init__(self) -> None:
        self.running = 0  # requests for an answer that is not whole yet
        self._responses: Counter[int] = Counter()  # by HTTP status
        self._first = Histogram("Time to the first token of a stream", FIRST_TOKEN_S)
        self._whole = Histogram("Time to the last token", REQUEST_S)

    def responded(self, status: int) -> None:
        self._responses[status] += 1

    def first_token(self, seconds: float) -> None:
        self._first.add(seconds)

    def answered(self, seconds: float) -> None:
        self._whole.add(seconds)

    def text(self, workers: Sequence[Worker]) -> str:
        """Return Prometheus' text format, version 0.0.4."""
        lines = [
            *head("num_requests_running", "Requests whose answer is not whole", "gauge"),
            f"mpillm:num_requests_running{{{_LABEL}}} {self.running}",
            *head("http_responses_total", "HTTP responses", "counter"),
        ]
        lines += [
            f'mpillm:http_responses_total{{{_LABEL},status="{status}"}} {n}'
            for status, n in sorted(self._responses.items())
        ]
        for name, histogram in (
            ("time_to_first_token_seconds", self._first),
            ("e2e_request_latency_seconds", self._whole),
        ):
            lines += [*head(name, histogram.help, "histogram"), *histogram.lines(f"mpillm:{name}", _LABEL)]
        values = [(not worker.gone, worker.running, worker.n_requests) for worker in workers]
        for i, (name, help_, kind) in enumerate(_SERVERS):
            lines += head(name, help_, kind)
            lines += [
                f'mpillm:{name}{{server="{escaped(worker.base)}",kind="{worker.kind}"}} {int(value[i])}'
                for worker, value in zip(workers, values, strict=True)
            ]
        return "\n".join(lines) + "\n"
