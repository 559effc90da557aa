"""Whatever comes over a connection is answered or refused: no traceback, no 500, and nothing stays behind."""

from __future__ import annotations

import asyncio
import logging
import re

import pytest

from tests.helpers.http_api import DEADLINE_S, api
from tests.helpers.odd_requests import (
    CHUNKED,
    HOST,
    NEXT,
    POST,
    request,
    talk,
)


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
            answer = await talk(a.base, sent, DEADLINE_S)
            assert answer.startswith(status), answer
            if b"100" in status:
                assert b"HTTP/1.1 400 Bad Request\r\n" in answer and b"prompt is missing" in answer

    asyncio.run(asyncio.wait_for(test(), DEADLINE_S))
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


# Two programs that read one of these in two ways let a request hide in another's body.
AMBIGUOUS = {
    "two lengths": POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "a length and chunks": CHUNKED + b"Content-Length: 2\r\n\r\n{}",
    "lengths in a list": POST + b"Content-Length: 2, 2\r\n\r\n{}",
    "a signed length": POST + b"Content-Length: +2\r\n\r\n{}",
    "a length with an underscore": POST + b"Content-Length: 0_2\r\n\r\n{}",
    "a length of 20 digits": POST + b"Content-Length: 99999999999999999999\r\n\r\n{}",
    "chunks that are not last": POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "nearly chunked": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a blank before the colon": POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "a folded header": POST + b"A: b\r\n Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "lines that end with LF": POST.replace(b"\r\n", b"\n") + b"Content-Length: 2\n\n{}",
    "a bare CR": POST + b"A: b\rContent-Length: 2\r\n\r\n{}",
    "a chunk without its end": CHUNKED + b"\r\n2\r\n{}xx0\r\n\r\n",
    "a chunk's size with 0x": CHUNKED + b"\r\n0x2\r\n{}\r\n0\r\n\r\n",
    "an endless chunk's size": CHUNKED + b"\r\n" + b"f" * 17 + b"\r\n{}",
    "NUL in a header": POST + b"A: \0\r\n\r\n",
    "two hosts": POST + HOST + b"\r\n",
    "no host": POST.replace(HOST, b"") + b"\r\n",
}


@pytest.mark.parametrize("case", AMBIGUOUS)
@pytest.mark.parametrize("cut", [False, True])
def test_a_request_that_has_no_one_meaning(case: str, cut: bool) -> None:
    """It is refused, and what comes behind it is not answered."""

    async def test() -> None:
        async with api() as a:
            answer = await talk(
                a.base, AMBIGUOUS[case] + NEXT, DEADLINE_S, len(AMBIGUOUS[case]) // 2 if cut else None
            )
            assert re.match(rb"HTTP/1\.[01] (400|505) ", answer), answer
            assert answer.count(b"HTTP/1.") == 1 and b'"version"' not in answer
            await a.idle()

    asyncio.run(asyncio.wait_for(test(), DEADLINE_S))


BROKEN = [b"zz\r\n", b"2\r\n{}xx", b"2 \r\n{}", b"2\r\n{}\r\n0\r\nno header\r\n\r\n"]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_body_that_breaks_when_its_request_is_there(
    broken: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Its request is answered at once, once, and the connection ends; it does not wait for a rest."""

    async def test() -> None:
        async with api() as a:
            host, _, port = a.base.removeprefix("http://").partition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(CHUNKED + b"\r\n")
            await a.until(lambda: a.service.guard.active > 0)
            writer.write(broken + NEXT)
            answer = await asyncio.wait_for(reader.read(), 60.0)
            writer.close()
            assert re.findall(rb"HTTP/1.\d (\d+)", answer) == [b"400"]
            assert b"the body is broken: " in answer
            await a.idle()

    asyncio.run(asyncio.wait_for(test(), DEADLINE_S))
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("sent", [b"GET /version\r\n\r\n", NEXT.replace(b"/1.1", b"/2.0")])
@pytest.mark.parametrize("key", [None, "k"])
def test_another_version_of_http(sent: bytes, key: str | None) -> None:
    """It is refused in ours, and not answered in that one."""

    async def test() -> None:
        async with api(api_key=key) as a:
            answer = await talk(a.base, sent, DEADLINE_S)
            assert answer.startswith(b"HTTP/1.1 505 ") and b'"version"' not in answer, answer

    asyncio.run(asyncio.wait_for(test(), DEADLINE_S))


def test_requests_behind_each_other() -> None:
    """Each is answered, in their order, also where the body of one that is refused looks like a request."""
    hidden = POST.replace(b"/v1/completions", b"/nowhere") + b"Content-Length: %d\r\n\r\n" % len(NEXT) + NEXT
    last = NEXT.replace(HOST, HOST + b"Connection: close\r\n")

    async def test() -> None:
        async with api() as a:
            for cut in (None, 7, 70, 170, 230):
                answer = await talk(a.base, hidden + NEXT + hidden + last, DEADLINE_S, cut)
                assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"404", b"200", b"404", b"200"]

    asyncio.run(asyncio.wait_for(test(), DEADLINE_S))
