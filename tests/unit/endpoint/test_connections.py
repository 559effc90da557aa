"""How many connections a port takes, and which makes room."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import math
import resource

import pytest

from launch import logs
from launch.logs import log_handler
from mpillm.endpoint import connections
from mpillm.endpoint.connections import Connections
from tests.helpers.http_api import HOUR_MS, api, run

BODY = b'{"prompt": "hi", "max_tokens": 2}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n" % len(BODY)
MOST = 8


async def gone(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(ConnectionError):
        return await reader.read(1) == b""
    return True


@pytest.mark.parametrize("data", [b"", HEAD, HEAD + b"\r\n" + BODY[:-1]])
def test_the_connection_with_the_oldest_incomplete_request_is_closed(data: bytes) -> None:
    """Its client has sent nothing, half of the headers or half of the body."""

    async def test() -> None:
        async with api(connections=Connections(MOST)) as a:
            host, port = a.base.removeprefix("http://").split(":")
            strangers = []
            for _ in range(2 * MOST):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(data)
                strangers.append((reader, writer))
                await a.answer("/v1/completions", prompt="hi", max_tokens=2)
            assert await gone(strangers[0][0])
            for _, writer in strangers:
                writer.close()
            await a.idle()

    run(test)


def test_one_address_makes_room_for_the_others() -> None:
    """Whoever came first: the crowd is of one address."""

    async def test() -> None:
        async with api(connections=Connections(MOST)) as a:
            host, port = a.base.removeprefix("http://").split(":")
            other = ("127.0.0.2", 0)  # all of 127.0.0.0/8 is this machine's, on Linux
            reader, writer = await asyncio.open_connection(host, int(port), local_addr=other)
            crowd = [await asyncio.open_connection(host, int(port)) for _ in range(3 * MOST)]
            assert await gone(crowd[0][0])
            writer.write(HEAD + b"\r\n" + BODY)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            writer.close()
            for _, one in crowd:
                one.close()
            await a.idle()

    run(test)


def test_the_networks_of_addresses() -> None:
    class Transport(asyncio.BaseTransport):
        def get_extra_info(self, name: str, default: object = None) -> object:
            return peer

    seen = []
    for host in (
        "10.0.0.1",
        "::ffff:10.0.0.1",
        "2001:db8::1",
        "2001:db8::f:2",
        "2001:db9::1",
        "fe80::1%eth0",
    ):
        peer = (host, 1, 0, 0)
        seen.append(connections.client_of(Transport()))
    assert seen[:2] == ["10.0.0.1", "::ffff:10.0.0.1"] and seen[2] == seen[3]
    assert len({*seen}) == 5


@pytest.mark.long
def test_a_first_request_has_a_deadline() -> None:
    """Whoever has sent one may wait longer before the next, and for the body and the answer."""

    async def test() -> None:
        async with api(connections=Connections(1000, first_s=1.0)) as a:
            host, port = a.base.removeprefix("http://").split(":")
            silent, _ = await asyncio.open_connection(host, int(port))
            slow, drops = await asyncio.open_connection(host, int(port))
            honest, writer = await asyncio.open_connection(host, int(port))
            writer.write(HEAD + b"\r\n" + BODY[:-1])
            for byte in HEAD:
                with contextlib.suppress(ConnectionError):
                    drops.write(bytes([byte]))
                    await drops.drain()
                await asyncio.sleep(0.03)
            assert await gone(silent) and await gone(slow)
            writer.write(BODY[-1:])
            assert (await honest.readline()).startswith(b"HTTP/1.1 200 ")
            await asyncio.sleep(1.5)
            assert not honest.at_eof()
            writer.close()
            await a.idle()

    run(test)


def test_who_is_answered_is_left_in_peace() -> None:

    async def test() -> None:
        async with api(connections=Connections(MOST), core={"tpot_ms": 50.0}) as a:
            host, port = a.base.removeprefix("http://").split(":")
            reading = asyncio.ensure_future(a.events("/v1/completions", prompt="hi", max_tokens=20))
            await a.until(lambda: a.service.guard.active == 1 and len(a.world.open) == 1)
            for _ in range(3 * MOST):
                await asyncio.open_connection(host, int(port))
            assert len(await reading) >= 2

    run(test)


@pytest.mark.parametrize(("files", "most"), [(300, 108), (1024, 832), (20_000, 17_500)])
def test_connections_leave_files_for_the_run(files: int, most: int) -> None:
    assert connections.n_connections(files) == most


def test_the_limit_of_open_files_is_raised() -> None:
    limits = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    max_files = 1 << 16 if hard == unlimited else min(hard, 1 << 16)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_files - 1, hard))
        assert connections.raise_limit() == connections.n_connections(max_files)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (max_files, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == limits


@pytest.mark.parametrize(
    "sent",
    [
        b"\x1b[2J" + b"x" * 8000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: here\r\nX: " + b"\x01\x1b[31m" * 1000 + b"\r\n\r\n",
        b"GET /\x1b[31m HTTP/9.9x" + b"y" * 8000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A" * 100_000,
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9\x07\r\n\r\n",
    ],
    ids=["no HTTP", "a header", "a version", "a line without end", "a length"],
)
def test_what_is_no_http_is_neither_logged_nor_echoed_as_it_came(
    sent: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many come."""
    monkeypatch.setattr(logs, "_PER_S", math.inf)  # on a busy machine, they come slowly
    log = io.StringIO()
    handler = log_handler(log, "%(message)s")

    async def test() -> None:
        async with api() as a:
            host, port = a.base.removeprefix("http://").split(":")
            for _ in range(200):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(sent)
                reply = await reader.read()
                writer.close()
                assert b" 400 " in reply.partition(b"\r\n")[0] and len(reply) < 700
                assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["message"].isprintable()
            await a.idle()

    caplog.set_level(logging.INFO)
    logging.getLogger().addHandler(handler)
    try:
        run(test)
    finally:
        logging.getLogger().removeHandler(handler)
    assert len(log.getvalue()) < 20_000
    assert log.getvalue().replace("\n", "").isprintable()


@pytest.mark.parametrize("apart", [False, True], ids=["one packet", "body apart"])
def test_bytes_after_an_upgrade_are_dropped(apart: bool) -> None:
    """The request is answered; whatever the client sends after it, as to a websocket, is not kept."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    head += b"Content-Length: %d\r\n\r\n" % len(BODY)

    async def test() -> None:
        async with api(core={"ttft_ms": HOUR_MS}) as a:
            host, port = a.base.removeprefix("http://").split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(head if apart else head + BODY)
            if apart:
                await asyncio.sleep(0.05)
                writer.write(BODY)
            await a.until(lambda: len(a.world.open) == 1)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for _ in range(64):
                writer.write(b"x" * (1 << 20))
                await writer.drain()
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 32 << 10  # KiB
            writer.close()
            await a.idle()

    run(test)


def test_an_upgrade_is_answered_and_closed() -> None:
    async def test() -> None:
        async with api() as a:
            host, port = a.base.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: here\r\n" + upgrade + b"\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
            writer.close()
            await a.idle()

    run(test)


def test_a_client_of_http_1_0_gets_no_100() -> None:
    """It knows none (RFC 9110, 10.1.1), and would read it as the answer."""

    async def test() -> None:
        async with api() as a:
            host, port = a.base.removeprefix("http://").split(":")
            for expect in (b"100-continue", b"more"):
                reader, writer = await asyncio.open_connection(host, int(port))
                head = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Expect: %s\r\n\r\n" % expect
                writer.write(head)
                await asyncio.sleep(0.05)
                writer.write(BODY)
                assert (await reader.read()).startswith(b"HTTP/1.0 200 ")
                writer.close()
            await a.idle()

    run(test)
