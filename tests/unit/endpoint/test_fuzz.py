"""Whatever comes over a connection is answered or refused: no traceback, no 500, and nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.http_api import DEADLINE_S, Api, api
from tests.unit.endpoint.test_protocol import BODIES, JSON

PATHS = st.sampled_from(
    [
        *("/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/dummy", "/health", "/metrics"),
        *("/version", "/perf_metrics", "/", "*", "//", "/v1/models/%ff", "/v1/completions?stream=1", "/../x"),
    ]
)
METHODS = st.sampled_from(["GET", "POST", "POST", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "BREW"])
BYTES = st.binary(max_size=60)
HEADERS = st.dictionaries(
    st.sampled_from(
        ["Content-Type", "X-Request-Id", "Expect", "Authorization", "Accept-Encoding", "Upgrade"]
    ),
    st.text(st.characters(codec="ascii", exclude_characters="\r\n"), max_size=20),
    max_size=3,
)


def asking(**options: Any) -> dict[str, Any]:
    """Return a body that is answered."""
    return {"prompt": [1, 2], "messages": [{"role": "user", "content": "a"}], "max_tokens": 5} | options


GOOD = st.builds(asking, stream=st.booleans(), ignore_eos=st.booleans(), temperature=st.floats(0, 2))
BODY = st.one_of(GOOD, BODIES, JSON).map(lambda body: json.dumps(body).encode()) | BYTES


def request(method: str, path: str, headers: dict[str, str], body: bytes, more: int) -> bytes:
    """Return an HTTP request; with `more` than there is of a body, it waits for the rest."""
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: a",
        "Connection: close",
        f"Content-Length: {len(body) + more}",
    ]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


WHOLE = st.tuples(st.builds(request, METHODS, PATHS, HEADERS, BODY, st.just(0)), st.just(DEADLINE_S))
# Clients that go away after a moment: with an answer, without, or in its middle.
LEAVING = st.tuples(
    st.builds(request, METHODS, PATHS, HEADERS, BODY, st.sampled_from([0, 3])) | BYTES,
    st.sampled_from([0.0, 0.001, 0.01]),
)
CLIENTS = st.lists(WHOLE | LEAVING, min_size=1, max_size=8)


async def talk(a: Api, sent: bytes, patience_s: float) -> bytes:
    """Send `data` and return what comes back."""
    host, _, port = a.base.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(sent)
        return await asyncio.wait_for(reader.read(), patience_s)
    except (ConnectionError, asyncio.TimeoutError):
        return b""
    finally:
        writer.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(clients=CLIENTS, disaggregated=st.booleans())
def test_anything_over_a_connection(
    clients: list[tuple[bytes, int]], disaggregated: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()

    async def test() -> None:
        async with api(disaggregated) as a:
            for answer in await asyncio.gather(*(talk(a, *client) for client in clients)):
                assert re.match(rb"(HTTP/1\.[01] [1-4]\d\d |$)", answer[:16]), answer
            await a.idle()

    asyncio.run(asyncio.wait_for(test(), DEADLINE_S))
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (request("POST", "/v1/completions", {"Expect": "\x80"}, b"{}", 0), b"HTTP/1.1 417 "),
        (
            request("POST", "/v1/completions", {"Expect": "100-continue"}, b"{}", 0),
            b"HTTP/1.1 100 Continue\r\n",
        ),
        (b"A \xa2 HTTP/1.1\r\nHost: a\r\n\r\n", b"HTTP/1.0 400 "),
    ],
    ids=["expects what is no text", "waits to be asked", "no URL"],
)
def test_what_was_a_traceback(sent: bytes, status: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with api() as a:
            answer = await talk(a, sent, DEADLINE_S)
            assert answer.startswith(status), answer
            if b"100" in status:
                assert b"HTTP/1.1 400 Bad Request\r\n" in answer and b"prompt is missing" in answer

    asyncio.run(asyncio.wait_for(test(), DEADLINE_S))
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
