"""The server whose answers cost nothing, which a pace makes slow."""

from __future__ import annotations

import json
from http.client import HTTPConnection

import pytest

from mpillm.experiments.bench.bench_endpoint import null_server


@pytest.mark.parametrize("pace", [(), ("20",)])
def test_a_stream_has_its_pace(pace: tuple[str, ...]) -> None:
    """The first token is there before the others are sent, unless all are sent at once."""
    with null_server("mpillm.experiments.bench.null_server", *pace) as url:
        connection = HTTPConnection(url.removeprefix("http://"), timeout=300)
        for n in (1, 2, 5):
            body = {"max_tokens": n, "stream": True, "stream_options": {"include_usage": True}}
            connection.request("POST", "/v1/completions", json.dumps(body))
            response = connection.getresponse()
            first = response.read1(1 << 16) if pace and n > 2 else b""
            assert first.count(b"token_ids") == bool(first)
            events = (first + response.read()).decode().split("\n\n")
            assert events[-2:] == ["data: [DONE]", ""] and len(events) == n + 3
            usage = json.loads(events[n].removeprefix("data: "))["usage"]
            assert usage["completion_tokens"] == n
