"""How many connections a port takes, and which makes room."""

from __future__ import annotations

import asyncio
import contextlib
import resource

import pytest

from mpillm.endpoint import connections, http_thread
from tests.helpers.http_api import api, run

BODY = b'{"prompt": "hi", "max_tokens": 2}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n" % len(BODY)
MOST = 8


async def gone(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(ConnectionResetError):
        return await reader.read(1) == b""
    return True


@pytest.mark.parametrize("says", [b"", HEAD, HEAD + b"\r\n" + BODY[:-1]])
def test_who_has_waited_longest_for_a_whole_request_makes_room(
    says: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it has said nothing, half of the headers or half of the body."""
    monkeypatch.setattr(http_thread, "raise_limit", lambda: MOST)

    async def test() -> None:
        async with api() as a:
            host, port = a.base.removeprefix("http://").split(":")
            strangers = []
            for _ in range(2 * MOST):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(says)
                strangers.append((reader, writer))
                await a.answer("/v1/completions", prompt="hi", max_tokens=2)
            assert await gone(strangers[0][0])
            for _, writer in strangers:
                writer.close()
            await a.idle()

    run(test)


def test_who_is_answered_is_left_in_peace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_thread, "raise_limit", lambda: MOST)

    async def test() -> None:
        async with api(core={"tpot_ms": 50.0}) as a:
            host, port = a.base.removeprefix("http://").split(":")
            reading = asyncio.ensure_future(a.events("/v1/completions", prompt="hi", max_tokens=20))
            await a.until(lambda: a.service.guard.active == 1 and len(a.world.open) == 1)
            for _ in range(3 * MOST):
                await asyncio.open_connection(host, int(port))
            assert len(await reading) >= 2

    run(test)


def test_connections_leave_files_for_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        for files, most in ((300, 108), (1024, 832), (20_000, 17_500)):
            monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (100, files))
            monkeypatch.setattr(resource, "setrlimit", lambda _, pair, files=files: pair == (files, files))
            assert connections.raise_limit() == most
    finally:
        monkeypatch.undo()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == limits
