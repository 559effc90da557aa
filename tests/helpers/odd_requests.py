"""Requests to the API, of every kind: bodies, and HTTP as clients send it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import strategies as st

from tests.helpers.http_api import DEADLINE_S

NUMBERS = st.integers(-3, 70) | st.integers() | st.floats()
TEXTS = st.text(st.characters(), max_size=9)  # lone surrogates, too
LEAVES = st.none() | st.booleans() | NUMBERS | TEXTS
JSON = st.recursive(
    LEAVES, lambda one: st.lists(one, max_size=3) | st.dictionaries(TEXTS, one, max_size=3), max_leaves=6
)
MESSAGES = st.lists(st.fixed_dictionaries({"role": TEXTS, "content": TEXTS | JSON}), max_size=3)
NAMES = (
    *(
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "stop",
        "stop_token_ids",
    ),
    *(
        "stream",
        "stream_options",
        "ignore_eos",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "add_special_tokens",
        "request_id",
        "n",
        "logprobs",
        "echo",
        "model",
        "user",
        "tools",
    ),
)
PROMPTS = TEXTS | st.lists(st.integers(-1, 256), max_size=5) | st.lists(TEXTS, max_size=3)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "prompt": PROMPTS | JSON,
        "messages": MESSAGES | JSON,
        **{name: NUMBERS | st.booleans() | JSON for name in NAMES},
    },
)
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
EXITING = st.tuples(
    st.builds(request, METHODS, PATHS, HEADERS, BODY, st.sampled_from([0, 3])) | BYTES,
    st.sampled_from([0.0, 0.001, 0.01]),
)


async def talk(base: str, sent: bytes, patience_s: float, cut: int | None = None) -> bytes:
    """Send bytes, in two pieces if they are `cut`, and return what comes back."""
    host, _, port = base.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        if cut is not None:
            writer.write(sent[:cut])
            await asyncio.sleep(0.01)  # most likely they arrive apart
        writer.write(sent[cut:])
        return await asyncio.wait_for(reader.read(), patience_s)
    except (ConnectionError, asyncio.TimeoutError):
        return b""
    finally:
        writer.close()


HOST, POST = b"Host: a\r\n", b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n"
NEXT = b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n"
