"""What listens: HTTP of `serve` and of a leader. Whatever strangers say, who comes after them is answered."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path

from hypothesis import strategies as st

from mpillm.endpoint.admission import Guard
from tests.helpers.fuzzing import damaged, fuzz
from tests.helpers.http_api import DEADLINE_S, api
from tests.unit.endpoint.test_fuzz import CHUNKED, LEAVING, NEXT, WHOLE, request, talk
from tests.unit.endpoint.test_leader_service import BODY as ASKED
from tests.unit.endpoint.test_leader_service import led

WORDS = [
    *(
        b"\r\n",
        b"\n",
        b"\0",
        b"0\r\n\r\n",
        b"2\r\n{}\r\n",
        b"ffffffff\r\n",
        b": ",
        b"%00",
        b"//",
        b"HTTP/1.1",
    ),
    *(
        b"Content-Length: 5\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Expect: 100-continue\r\n",
        b"Host: b\r\n",
    ),
    *(b"Host: b\r\n", b"Connection: Upgrade\r\n", b"Content-Encoding: gzip\r\n", b"Cookie: "),
]
HEADERS = {"Authorization": "Bearer k", "Content-Type": "application/json; charset=utf-8"}
BODIES = [
    b'{"prompt": [1, 2], "max_tokens": 3}',
    b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "stream": true}',
]
SEEDS = [
    *(
        request("POST", f"/v1/{path}", HEADERS, body, 0)
        for path, body in zip(("completions", "chat/completions"), BODIES, strict=True)
    ),
    CHUNKED + b"\r\n%x\r\n%b\r\n0\r\nA: b\r\n\r\n" % (len(BODIES[0]), BODIES[0]),
    request("POST", "/v1/completions", HEADERS, BODIES[0], 0) + NEXT,
    NEXT * 3,
]
# A moment: what is damaged may have no end.
RAW = st.tuples(damaged(SEEDS, WORDS), st.sampled_from([0.0, 0.002, 0.02]))
CLIENTS = st.lists(st.tuples(WHOLE | LEAVING | RAW, st.none() | st.integers(0, 200)), min_size=1, max_size=6)
ANSWERED = re.compile(rb"(HTTP/1\.[01] ([1-4]\d\d|505) |$)")


@contextlib.contextmanager
def no_error_is_logged() -> Iterator[None]:
    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage())

    logged: list[str] = []
    kept = Kept(logging.ERROR)
    logging.getLogger().addHandler(kept)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(kept)
    assert not logged, logged


@fuzz(CLIENTS, st.booleans(), st.sampled_from([None, "k"]), examples=25)
def test_http_of_serve(
    _: Path, clients: list[tuple[tuple[bytes, float], int | None]], disaggregated: bool, key: str | None
) -> None:
    async def test() -> None:
        async with api(disaggregated, api_key=key) as a:
            talks = [talk(a.base, *client, cut) for client, cut in clients]
            for answer in await asyncio.gather(*talks):
                assert ANSWERED.match(answer[:16]), answer
            await a.idle()
            honest = await a.post("/v1/completions", BODIES[0], Authorization="Bearer k")
            assert honest.status == 200 and (await honest.json())["usage"]["completion_tokens"] == 3
            await a.idle()

    with no_error_is_logged():
        asyncio.run(asyncio.wait_for(test(), DEADLINE_S))


@fuzz(CLIENTS, st.sampled_from([None, "k"]), examples=15)
def test_http_of_a_leader(
    _: Path, clients: list[tuple[tuple[bytes, float], int | None]], key: str | None
) -> None:
    async def test() -> None:
        async with led(guard=Guard(key, 1 << 20, "127.0.0.1")) as it:
            talks = [talk(it.base, *client, cut) for client, cut in clients]
            for answer in await asyncio.gather(*talks):
                assert ANSWERED.match(answer[:16]), answer
            if key:
                it.session.headers["Authorization"] = f"Bearer {key}"
            status, text = await it.ask(ASKED)
            assert status == 200 and '"finish_reason": "length"' in text

    with no_error_is_logged():
        asyncio.run(asyncio.wait_for(test(), DEADLINE_S))
