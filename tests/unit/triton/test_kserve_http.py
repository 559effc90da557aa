"""Triton's HTTP answers that end badly."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from mpillm.triton.bench.load import Target, over_http
from mpillm.triton.bench.load_request import LoadRequest
from mpillm.triton.client.connection import InferError
from mpillm.triton.client.kserve_http import KServeConnection
from tests.helpers.endless_server import ENDLESS, OK, endless_server

TIMEOUT_S = 60.0


def reply(body: bytes, length: int | None = None) -> bytes:
    """Return an HTTP answer that announces `length` bytes, by default as many as it has."""
    n = len(body) if length is None else length
    return b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (n, body)


GOOD = reply(b'{"sequence_length": 3}')
EMPTY = reply(b'{"sequence_length": 0}')
CUT = reply(b'{"sequence_len', 100)
NO_JSON = reply(b"oops")
FAILS = reply(b'data: {"error": "no"}\n\ndata: {"sequence_length": 1}\n\n', 300)
BAD = {"cut short": CUT, "no JSON": NO_JSON, "no tokens": EMPTY, "no field": reply(b"{}")}


@contextmanager
def server(*replies: bytes) -> Iterator[str]:
    """Return the address of a server that gives a reply to each connection and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for answer in replies:
                connection, _ = listener.accept()
                with connection:
                    while b"}" not in connection.recv(65536):
                        pass
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(TIMEOUT_S)


@pytest.mark.parametrize("answer", [CUT, NO_JSON])
def test_an_answer_that_cannot_be_read(answer: bytes) -> None:
    with (
        server(answer) as url,
        KServeConnection(url, TIMEOUT_S) as connection,
        pytest.raises(InferError, match=url),
    ):
        list(connection.generate("tensorrt_llm", {}, False))


def test_after_a_failed_stream_the_connection_serves_again() -> None:
    with server(FAILS, GOOD) as url, KServeConnection(url, TIMEOUT_S) as connection:
        with pytest.raises(InferError, match="no"):
            list(connection.generate("tensorrt_llm", {}, True))
        assert list(connection.generate("tensorrt_llm", {}, False)) == [{"sequence_length": 3}]


@pytest.mark.parametrize("name", BAD)
def test_a_lost_answer_is_an_error_of_the_benchmark(name: str) -> None:
    request = LoadRequest(np.array([1], np.int32), 3)
    with server(BAD[name], GOOD) as url:
        records = over_http(Target(url, "tensorrt_llm", TIMEOUT_S, False), [request] * 2, np.zeros(2), 1)
    assert [bool(record.error) for record in records] == [True, False]
    assert [record.output_len for record in records] == [0, 3]


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000,
        b"[1]",
        b'{"outputs": [{"name": "a", "datatype": "INT32", "shape": [1], "data": [99999999999999999999]}]}',
        b'{"outputs": [{"name": "a", "datatype": "BYTES", "shape": [1], "data": [1]}]}',
        b'{"outputs": [{"name": "a", "datatype": [], "shape": [1], "data": [1]}]}',
        b'{"outputs": 1}',
    ],
)
def test_an_answer_that_makes_no_sense(body: bytes) -> None:
    with (
        server(reply(body)) as url,
        KServeConnection(url, TIMEOUT_S) as connection,
        pytest.raises(InferError, match=url) as error,
    ):
        list(connection.infer("tensorrt_llm", {"a": np.array([1], np.int32)}))
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ENDLESS)
def test_an_answer_without_end(way: str, stream: bool) -> None:
    with (
        endless_server(*ENDLESS[way]) as url,
        KServeConnection(url, TIMEOUT_S, 1 << 22) as connection,
        pytest.raises(
            InferError, match=f"{url}: .*(longer than 4194304 bytes|LineTooLong|more than 100 headers)"
        ),
    ):
        list(connection.generate("tensorrt_llm", {}, stream))


def test_a_stream_takes_no_longer_than_an_answer_may() -> None:
    with (
        endless_server(OK + b"\r\n", b"data: {}\n\n", 0.05) as url,
        KServeConnection(url, 1.0) as connection,
        pytest.raises(InferError, match=f"{url}: it has not answered within 1 s"),
    ):
        list(connection.generate("tensorrt_llm", {}, True))


def test_an_error_of_a_server_is_cut_to_a_printable_line() -> None:
    response = b"HTTP/1.1 400 Bad\r\nConnection: close\r\n\r\n" + b"\x1b[31m\n" * 10000
    with (
        server(response) as url,
        KServeConnection(url, TIMEOUT_S) as connection,
        pytest.raises(InferError, match="HTTP 400") as error,
    ):
        list(connection.generate("tensorrt_llm", {}, False))
    assert str(error.value).isprintable() and len(str(error.value)) < 400
