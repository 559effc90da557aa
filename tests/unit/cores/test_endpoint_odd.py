"""Servers that are allowed to do what few do: what they answer counts, or one message names what is odd."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable

import pytest

from disagg.errors import ConfigError
from mpillm.errors import RunError
from tests.helpers.endpoint_cores import FINAL, PROMPTS, SERVER, Rows, core_of, failure, requests, started
from tests.helpers.scripted_server import (
    DONE,
    STREAM,
    Reply,
    Request,
    ScriptedServer,
    answer_of,
    choice,
    chunk,
    event,
    good,
    head,
    plain,
)

_CLOSES = "keep-alive, then the end of the connection"


def _events(request: Request) -> list[bytes]:
    """Return the events of a good answer, without usage and [DONE]."""
    tokens = answer_of(request.json["prompt"], request.json["max_tokens"])
    return [
        event(choice([token], "t", "length" if place == len(tokens) else None))
        for place, token in enumerate(tokens, 1)
    ]


def _old(request: Request, *, keeps: bool) -> Reply:
    """Answer as HTTP/1.0, whose bodies have a length or end with their connection."""
    if request.json.get("stream"):
        body = b"".join(_events(request)) + event(b"[DONE]")
    else:
        (_, body) = b"".join(good(request).pieces).split(b"\r\n\r\n", 1)
    kept = head(Connection="keep-alive", Content_Length=len(body))
    start = (kept if keeps else head()).replace(b"HTTP/1.1", b"HTTP/1.0")
    return Reply([start, *(body[i : i + 7] for i in range(0, len(body), 7))], "keep" if keeps else "close")


def _stream(change: Callable[[list[bytes]], list[bytes]]) -> Callable[[Request], Reply]:
    """Answer a stream whose events are changed."""

    def answer(request: Request) -> Reply:
        if not request.json.get("stream"):
            return good(request)
        return Reply([STREAM, *map(chunk, change(_events(request))), chunk(b"")])

    return answer


def _bytewise(events: list[bytes]) -> list[bytes]:
    """Return a chunk for each byte, with text of which a character takes several."""
    whole = b"".join(events).replace(b'"text": "t"', '"text": "é\N{GRINNING FACE}"'.encode())
    return [whole[i : i + 1] for i in range(len(whole))]


def _without_reason(events: list[bytes]) -> list[bytes]:
    """Leave finish_reason out until there is one."""
    return [one.replace(b', "finish_reason": null', b"") for one in events]


def _with_empty_choices(events: list[bytes]) -> list[bytes]:
    usage = event({"choices": [], "usage": None}), event({"usage": {"prompt_tokens": 1, "extra": {}}})
    return [event({"choices": []}), events[0], usage[0], *events[1:], usage[1]]


ODD: dict[str, Callable[[Request], Reply]] = {
    _CLOSES: lambda request: Reply(good(request).pieces, "close"),
    "HTTP/1.0": lambda request: _old(request, keeps=False),
    "HTTP/1.0 that keeps its connection": lambda request: _old(request, keeps=True),
    "a chunk for each byte": _stream(_bytewise),
    "lines that end with CR": _stream(lambda all_: [one.replace(b"\n", b"\r") for one in all_]),
    "lines that end with CR, and CR LF in two chunks": _stream(
        lambda all_: [part for one in all_ for part in (one.replace(b"\n", b"\r\n")[:-1], b"\n")]
    ),
    "data without a blank": _stream(lambda all_: [one.replace(b"data: ", b"data:") for one in all_]),
    "comments": _stream(lambda all_: [part for one in all_ for part in (b":\n\n", b": busy\n\n", one)]),
    "no [DONE]": _stream(list),
    "no finish_reason until the end": _stream(_without_reason),
    "choices that are empty": _stream(_with_empty_choices),
}


@pytest.mark.parametrize("scenario", [SERVER, "--scenarios=Offline"])
@pytest.mark.parametrize("name", ODD)
def test_odd_servers(name: str, scenario: str) -> None:
    """Each answer comes once, whole."""
    with ScriptedServer(ODD[name]) as server, started(server, scenario) as core:
        for _ in range(2):  # over connections that had a request before, where they are left
            core.enqueue(requests())
            ended = [row for row in Rows(core).until(len(PROMPTS)) if row[1] & FINAL]
            assert sorted(row[2] for row in ended) == sorted(answer_of(prompt, 4) for prompt in PROMPTS)


def test_the_first_token_does_not_wait_where_lines_end_with_cr() -> None:
    first = event(choice([9], "t")).replace(b"\n", b"\r")
    reply = Reply([STREAM, chunk(first)], "hang")
    answers = lambda request: reply if request.json["max_tokens"] > 1 else good(request)  # noqa: E731
    with ScriptedServer(answers) as server, started(server, SERVER) as core:
        core.enqueue(requests([[9]]))
        rows = Rows(core)
        while not rows.rows:
            rows.poll()
        assert rows.rows[0][2] == [9]


CHATS = {
    "a chat's answer": {"choices": [{"index": 0, "delta": {"content": "hello"}, "finish_reason": "stop"}]},
    "a chat's thoughts": {
        "choices": [{"index": 0, "delta": {"reasoning_content": "hm"}, "finish_reason": "stop"}]
    },
    "a call of a tool": {
        "choices": [{"index": 0, "message": {"tool_calls": [{}]}, "finish_reason": "tool_calls"}]
    },
}


@pytest.mark.parametrize("name", CHATS)
def test_what_is_no_completion_is_named(name: str) -> None:
    def answers(request: Request) -> Reply:
        if request.json["max_tokens"] == 1:
            return good(request)
        return Reply([STREAM, chunk(event(CHATS[name])) + DONE])

    with ScriptedServer(answers) as server, started(server, SERVER) as core:
        core.enqueue(requests([[9]]))
        assert re.search("it sent JSON that is not a completion: .*it answers as a chat", failure(core))


@pytest.mark.parametrize("url", ["http://{}", "{}", "http://{}/v1/"])
def test_addresses_of_ipv6(url: str) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with ScriptedServer(host="::1") as server, core_of(url.format(server.address)) as core:
        core.load()
        core.run_health_check()
        core.enqueue(requests())
        Rows(core).until(len(PROMPTS))
        assert {request.headers["host"] for request in server.requests} == {server.address}


@pytest.mark.parametrize("path", ["/models/small", "/models/small/", "/models/small/v1", "/models/small/v1/"])
def test_a_path_before_that_of_the_api(path: str) -> None:
    others = {
        "/models/small/v1/completions": good,
        "/models/small/health": lambda request: plain({}),
        "/models/small/v1/models": lambda request: plain({"data": [{"id": "m"}]}),
    }
    with ScriptedServer(others=others) as server, core_of(f"{server.url}{path}") as core:
        core.load()
        core.run_health_check()
        core.enqueue(requests())
        Rows(core).until(len(PROMPTS))
        assert all(request.path.startswith("/models/small/") for request in server.requests)


@pytest.mark.parametrize(
    "url",
    [
        *("unix:///run/vllm.sock", "::1:8000", "ftp://host:8000", "http://", "http://host:port"),
        *("http://host:99999", "http://me:word@host:8000", "http://host:8000/v1?version=1"),
    ],
)
def test_addresses_that_are_none(url: str) -> None:
    """What would not be used is not passed over in silence, either."""
    with pytest.raises(ConfigError, match=rf"--trtllm_server_urls {re.escape(url)}"), core_of(url):
        pass


def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of an unreachable server mentions a proxy that is set for its address."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with ScriptedServer() as server, started(server, SERVER) as core:
        core.enqueue(requests())
        Rows(core).until(len(PROMPTS))
        address = server.address
    with core_of(address, "--load_deadline=3") as core, pytest.raises(RunError) as caught:
        core.load()
    assert "Connection refused (the proxy of the environment is not used)" in str(caught.value)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with core_of(address, "--load_deadline=3") as core, pytest.raises(RunError) as caught:
        core.load()
    assert "proxy" not in str(caught.value)
