"""Listeners: HTTP, wake-ups, doctor's port. Whatever clients send, the next client is served."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from unittest import mock

from hypothesis import strategies as st

from mpillm.comms import node_barrier
from mpillm.comms.wakeup_socket import WakeupSocket
from mpillm.doctor import network
from mpillm.endpoint.admission import Guard
from tests.helpers.fuzzing import damaged, fuzz
from tests.helpers.http_api import DEADLINE_S, api
from tests.helpers.led_servers import BODY as REQUEST_BODY
from tests.helpers.led_servers import led
from tests.helpers.odd_requests import CHUNKED, EXITING, NEXT, WHOLE, request, talk

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
CLIENTS = st.lists(st.tuples(WHOLE | EXITING | RAW, st.none() | st.integers(0, 200)), min_size=1, max_size=6)
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
            status, text = await it.ask(REQUEST_BODY)
            assert status == 200 and '"finish_reason": "length"' in text

    with no_error_is_logged():
        asyncio.run(asyncio.wait_for(test(), DEADLINE_S))


@cache
def wakeups() -> tuple[WakeupSocket, WakeupSocket, str]:
    run = secrets.token_hex(8)
    for rank, wakeup in enumerate(made := (WakeupSocket(), WakeupSocket())):
        wakeup.open(run, rank, (0, 1))
    return (*made, run)


PAYLOADS = st.lists(st.sampled_from([b"", b"!", b"-", b"!" * 5000]) | st.binary(max_size=20), max_size=30)


@fuzz(PAYLOADS, st.integers(0, 3), st.sampled_from(["ring", "meet"]), examples=40)
def test_wakeups_and_barriers(_: Path, payloads: list[bytes], n: int, which: str) -> None:
    """Any process of a node can reach them. Wake-ups still arrive, and no rank waits for other processes."""
    mine, other, run = wakeups()
    if which == "ring":
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger,
            contextlib.suppress(BlockingIOError),
        ):
            stranger.setblocking(False)
            for one in payloads:
                stranger.sendto(one, f"\0mpillm-{run}-0".encode())
        mine.sleep(0.0)
        other.probe_peers([0])
        assert other.is_reliable and mine.sleep(30.0) and not mine.sleep(0.0)
        return
    name = secrets.token_hex(8)
    with mock.patch.object(node_barrier, "_PATIENCE_S", 0.05), contextlib.ExitStack() as strangers:
        first = threading.Thread(target=node_barrier.meet, args=(name, 3))
        first.start()
        for one in payloads[:n]:
            stranger = strangers.enter_context(socket.socket(socket.AF_UNIX))
            with contextlib.suppress(OSError):
                stranger.connect(f"\0{name}".encode())
                stranger.sendall(one)
        first.join(30.0)
        assert not first.is_alive()


class FixedReply:
    """A port that sends the same data to each connection, and may keep the connection open."""

    def __init__(self) -> None:
        self.data, self.stays = b"", False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(self.data)
                if self.stays:
                    time.sleep(0.03)


@cache
def doctors() -> tuple[network.KeyServer, FixedReply]:
    return network.KeyServer(), FixedReply()


@fuzz(st.lists(st.binary(max_size=40), max_size=5), st.binary(max_size=40), st.booleans(), examples=40)
def test_a_doctors_port(_: Path, strangers: list[bytes], reply: bytes, stays: bool) -> None:
    """Other clients do not keep its peers out, and another listener is not taken for a peer."""
    (own, other), here = doctors(), ("127.0.0.1",)
    for one in strangers:
        with (
            socket.create_connection(("127.0.0.1", own.port), 30.0) as stranger,
            contextlib.suppress(OSError),
        ):
            stranger.sendall(one)
    facts = network.HostFacts("h", "", here, own.port, "", own.key, "")
    with mock.patch.object(network, "_CONNECT_S", 30.0):
        assert network.reach(facts) == network.Reachability(here, ())
    other.data, other.stays = reply, stays
    with mock.patch.object(network, "_CONNECT_S", 0.02 if stays else 30.0):
        reached = network.reach(facts._replace(port=other.port))
    assert not reached.good and all(len(one) < 200 for one in reached.bad)
