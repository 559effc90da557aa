"""The two threads of rank 0: the real HTTP thread, and the main thread's role beside it."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from functools import partial
from http.client import HTTPConnection, HTTPResponse
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from disagg.errors import ConfigError
from mpillm.comms.messages import ANSWER, CANCEL, QUERY, RESPONSE, Batch, ResponseFlag
from mpillm.comms.tags import Tag
from mpillm.comms.transport import Envelope
from mpillm.data.dataset import PromptLimits
from mpillm.data.tokenizer import ByteTokenizer
from mpillm.endpoint.admission import Guard
from mpillm.endpoint.app import Service
from mpillm.endpoint.frontend import Frontend, Mailbox
from mpillm.endpoint.http_thread import HttpThread, bind, url
from mpillm.endpoint.open_requests import OpenRequests
from mpillm.endpoint.protocol import ServedModel
from mpillm.errors import RunError
from tests.helpers.ports import free_port
from tests.helpers.route import Network

DEADLINE_S = 120.0


class Rank0:
    """Holds what rank 0 has, and plays the leader."""

    def __init__(
        self,
        drain_s: float = DEADLINE_S,
        fetch_s: float = DEADLINE_S,
        guard: Guard | None = None,
        resets: bool = False,
    ) -> None:
        self.network = Network(2, random.Random(0))
        self.queries: list[Batch] = []
        self.network.routes[1].handlers[Tag.QUERY] = lambda received: self.queries.append(
            QUERY.read(received.buffer)
        )
        self.cancelled: list[int] = []
        self.network.routes[1].handlers[Tag.CANCEL] = lambda received: self.cancelled.extend(
            CANCEL.read(received.buffer)
        )
        self.queries_at_reset: list[int] = []  # how many messages with requests came before
        self.network.routes[1].handlers[Tag.RESET_CACHE] = lambda _: self.queries_at_reset.append(
            len(self.queries)
        )
        mailbox = Mailbox()
        self.open = OpenRequests(False, mailbox.out.append)
        self.socket = bind("127.0.0.1", free_port())
        served = ServedModel(("m",), ByteTokenizer(), PromptLimits(256, 100))
        service = Service(
            served, self.open, guard=guard, reset_prefix_cache=partial(mailbox.put, None) if resets else None
        )
        self.http = HttpThread(service, self.open, mailbox, self.socket, fetch_s)
        self.role = Frontend(self.network.routes[0], 1, mailbox, self.http, drain_s)
        self.address = url(self.socket).removeprefix("http://").removesuffix("/v1")

    def turn_until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end
            if not (self.role.poll() or self.network.deliver()):
                time.sleep(0.001)

    def serve(self, window: int = 10) -> None:
        self.role.ready()
        assert not self.role.done("ready"), "the leader has granted nothing"
        self.role._on_window(1, window)
        self.turn_until(lambda: self.role.done("ready"))
        self.role.test()

    def ask(self, path: str = "/v1/completions", **body: object) -> HTTPConnection:
        connection = HTTPConnection(self.address, timeout=DEADLINE_S)
        connection.request("POST", path, json.dumps({"prompt": "x", "max_tokens": 2} | body))
        return connection

    def answer(self, *rows: tuple[int, int, int]) -> None:
        """Send rank 0 rows of (id, tokens, flags), as the leader does."""
        made = np.array(list(rows), RESPONSE)
        batch = Batch(made, np.full(int(made["n_tokens"].sum()), ord("a"), np.int32))
        self.network.routes[0].handlers[Tag.ANSWER](Envelope(1, Tag.ANSWER, ANSWER.write(batch)))


FIRST_AND_FINAL = int(ResponseFlag.FIRST | ResponseFlag.FINAL)


def test_a_signal_lets_what_is_open_end_and_takes_nothing_more() -> None:
    rank0 = Rank0()
    rank0.serve()
    connection = rank0.ask()
    rank0.turn_until(lambda: rank0.queries)
    assert rank0.role.end_early() and not rank0.role.end_early(), "once"
    rank0.turn_until(lambda: rank0.http._service.guard.draining)
    assert not rank0.role.done("test")
    rank0.answer((0, 2, FIRST_AND_FINAL))
    response: HTTPResponse = connection.getresponse()
    assert json.loads(response.read())["choices"][0]["text"] == "aa"
    rank0.turn_until(lambda: rank0.role.done("test"))
    with pytest.raises(ConnectionRefusedError):
        rank0.ask()
    rank0.role.stop()
    assert not rank0.http.thread.runs and not rank0.cancelled


def test_caches_are_emptied_between_requests_as_clients_send_them() -> None:
    """A request that is sent after the answer must find nothing: it may not overtake the message."""
    rank0 = Rank0(resets=True)
    rank0.serve()
    first = rank0.ask()
    rank0.turn_until(lambda: rank0.queries)
    resetting = HTTPConnection(rank0.address, timeout=DEADLINE_S)
    resetting.request("POST", "/reset_prefix_cache")
    response = resetting.getresponse()  # nobody polls the main thread's role meanwhile
    assert (response.status, response.read()) == (200, b"")
    second = rank0.ask()
    rank0.turn_until(lambda: len(rank0.queries) == 2)
    assert rank0.queries_at_reset == [1]
    rank0.answer((0, 2, FIRST_AND_FINAL), (1, 2, FIRST_AND_FINAL))
    for connection in (first, second):
        assert connection.getresponse().status == 200
    rank0.role.end_early()
    rank0.turn_until(lambda: rank0.role.done("test"))
    rank0.role.stop()


def test_clients_cannot_empty_caches_by_default() -> None:
    rank0 = Rank0()
    rank0.serve()
    connection = HTTPConnection(rank0.address, timeout=DEADLINE_S)
    connection.request("POST", "/reset_prefix_cache")
    assert connection.getresponse().status == 404
    rank0.role.end_early()
    rank0.turn_until(lambda: rank0.role.done("test"))
    rank0.role.stop()


class BrokenGuard(Guard):
    """Fails when requests are to end."""

    def drain(self) -> None:
        raise OSError(24, "Too many open files")


def test_what_fails_while_requests_end_ends_the_run() -> None:
    """Under serve the test has no deadline."""
    rank0 = Rank0(guard=BrokenGuard())
    rank0.serve()
    rank0.role.end_early()
    with pytest.raises(RunError, match="Too many open files"):
        rank0.turn_until(lambda: rank0.role.done("test"))
    rank0.role.stop()


def test_what_has_not_ended_when_the_time_is_over_is_cancelled() -> None:
    rank0 = Rank0(drain_s=0.01)
    rank0.serve()
    connection = rank0.ask()
    rank0.turn_until(lambda: rank0.queries)
    rank0.role.end_early()
    rank0.turn_until(lambda: rank0.cancelled)
    rank0.answer(
        (0, 0, int(ResponseFlag.FINAL | ResponseFlag.CANCELLED)), (0, 0, int(ResponseFlag.CANCEL_DONE))
    )
    response = connection.getresponse()
    assert (response.status, json.loads(response.read())["error"]["code"]) == (503, "shutting_down")
    rank0.turn_until(lambda: rank0.role.done("test"))
    rank0.role.stop()


def test_the_end_does_not_wait_for_a_cache_that_no_server_fetches() -> None:
    """Its request is open while its client has the answer; a stop that waits is ended by a SIGKILL."""
    rank0 = Rank0(fetch_s=0.01)
    rank0.serve()
    rank0.open.open({"max_output": 1}, [5])
    rank0.turn_until(lambda: rank0.queries)
    rank0.role.end_early()
    end = time.monotonic() + DEADLINE_S / 2
    rank0.turn_until(lambda: rank0.cancelled or time.monotonic() > end)
    assert rank0.cancelled == [0]
    rank0.answer(
        (0, 0, int(ResponseFlag.FINAL | ResponseFlag.CANCELLED)), (0, 0, int(ResponseFlag.CANCEL_DONE))
    )
    rank0.turn_until(lambda: rank0.role.done("test"))
    rank0.role.stop()


def test_requests_wait_for_the_test_and_for_room_at_the_leader() -> None:
    rank0 = Rank0()
    rank0.role.ready()
    rank0.turn_until(lambda: rank0.http.listening)
    connections = [rank0.ask() for _ in range(3)]
    rank0.turn_until(lambda: len(rank0.open) == 3)
    rank0.role.poll()
    rank0.role._on_window(1, 2)
    rank0.role.poll()
    assert not rank0.queries and not rank0.network.deliver(), "the test has not begun"
    rank0.role.test()
    rank0.turn_until(lambda: sum(map(len, rank0.queries)) == 2)
    connections[-1].close()  # perhaps the one that waits, perhaps not
    for connection in connections[:-1]:
        connection.close()
    rank0.turn_until(lambda: sorted(rank0.cancelled) == [0, 1] and len(rank0.open) == 2)
    rank0.answer(*((id_, 0, int(ResponseFlag.FINAL | ResponseFlag.CANCELLED)) for id_ in (0, 1)))
    rank0.answer(*((id_, 0, int(ResponseFlag.CANCEL_DONE)) for id_ in (0, 1)))
    rank0.turn_until(lambda: len(rank0.open) == 0)
    rank0.role.stop()


def test_an_answer_to_nobody_ends_the_run() -> None:
    rank0 = Rank0()
    rank0.serve()
    rank0.answer((7, 1, FIRST_AND_FINAL))
    rank0.turn_until(lambda: rank0.http.error)
    with pytest.raises(RunError, match="the HTTP server failed: KeyError"):
        rank0.role.done("test")
    rank0.role.stop()


def test_a_port_in_use_or_a_host_elsewhere() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"--host 127.0.0.1 --port {port}: Address already in use; name another port"
        ):
            bind("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"--host 203.0.113.1 --port 0: .*; name another host"):
        bind("203.0.113.1", 0)  # for documentation: nobody has it
    with pytest.raises(ConfigError, match=r"--host no\.such\.host\.invalid: "):
        bind("no.such.host.invalid", 0)
    six: Any = SimpleNamespace(getsockname=lambda: ("::1", 8000, 0, 0))
    assert url(six) == "http://[::1]:8000/v1"
