"""Servers of others that go on for ever, slowly or fast, and blocking clients that don't."""

from __future__ import annotations

import re
import time

import pytest

from launch.bounded_http import BoundedClient, ReplyError, page
from launch.health_check import _problem
from mpillm.triton.tritonserver import model_table
from tests.helpers.endless_server import ENDLESS, OK, endless_server
from tests.helpers.scripted_server import Reply, Request, ScriptedServer, head, plain

PATIENCE_S = 30.0  # far below what the endless server goes on for


@pytest.mark.parametrize("way", ENDLESS)
@pytest.mark.long
def test_an_answer_without_end_is_given_up_for_its_length(way: str) -> None:
    began = time.monotonic()
    with endless_server(*ENDLESS[way]) as url, pytest.raises(ReplyError) as error:
        page(f"http://{url}/health", 60.0)
    assert time.monotonic() - began < PATIENCE_S
    assert re.search("longer than 16777216 bytes|LineTooLong|more than 100 headers", str(error.value))


@pytest.mark.parametrize(
    ("first", "piece"),
    [
        (OK + b"Content-Length: 1000000\r\n\r\n", b"x"),
        (OK, b"a: b\r\n"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"", b"H"),
    ],
)
def test_a_drop_at_a_time_is_given_up_for_its_time(first: bytes, piece: bytes) -> None:
    began = time.monotonic()
    with (
        endless_server(first, piece, 0.05) as url,
        pytest.raises(ReplyError, match=r"^it has not answered within 1 s$"),
    ):
        page(f"http://{url}/health", 1.0)
    assert time.monotonic() - began < PATIENCE_S


def test_what_went_wrong_is_a_line() -> None:
    """A server's words reach no terminal as it sent them."""
    with (
        ScriptedServer(
            others={"/": lambda request: Reply([b"\x1b[31mHTTP\x07" * 5000 + b"\r\n\r\n"])}
        ) as server,
        pytest.raises(ReplyError) as error,
    ):
        page(server.url, 60.0)
    assert str(error.value).isprintable() and 50 < len(str(error.value)) < 300


def test_a_connection_is_kept_until_something_goes_wrong() -> None:
    def answer(request: Request) -> Reply:
        return (
            plain({"at": request.connection})
            if len(server.requests) != 2
            else Reply([head(Content_Length=9)], "close")
        )

    with ScriptedServer(others={"/": answer}) as server, BoundedClient(server.address) as connection:
        seen = []
        for _ in range(4):
            try:
                with connection.request("/", 60.0) as response:
                    seen.append(response.read())
            except ReplyError as error:
                seen.append(str(error).encode())
    assert seen[0] == b'{"at": 0}' and seen[1].startswith(b"IncompleteRead")
    assert seen[2:] == [b'{"at": 1}'] * 2


def test_a_health_check_returns_the_cause() -> None:
    with ScriptedServer(others={"/": lambda request: plain({}, "503 Busy")}) as server:
        assert _problem(server.url + "/") == "HTTP 503"
        assert _problem(server.url + "/health") == ""
    assert _problem(server.url + "/") == "Connection refused"


def test_a_table_of_models_that_is_none() -> None:
    bad = [[1], {"name": 1}, [{"version": "1"}], [{"name": None}], "x" * 1000, None]
    for value in bad:
        with ScriptedServer(others={"/": lambda request, value=value: plain(value)}) as server:  # type: ignore[misc]
            (line,) = model_table(server.url + "/")
        assert "it sent something that is not a list of models" in line and len(line) < 300
    names = [{"name": "a\x1b[31m", "reason": "b\nc"}]
    with ScriptedServer(others={"/": lambda request: plain(names)}) as server:
        table = "\n".join(model_table(server.url + "/"))
    assert r"a\x1b[31m" in table and r"b\nc" in table and "\x1b" not in table
