"""--reset_prefix_cache of servers: which route, what refuses, and when a client sends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from mpillm.cores.openai_client import cache_reset
from mpillm.cores.openai_client.cache_reset import reset_prefix_cache
from mpillm.cores.openai_client.endpoint import EndpointError, RemoteServer
from mpillm.errors import RunError
from tests.helpers.endpoint_cores import core_of
from tests.helpers.scripted_server import Reply, Request, ScriptedServer, head, plain

VLLM, SGLANG = "/reset_prefix_cache", "/flush_cache"
EMPTY = Reply([head(Content_Length=0)])


def missing(request: Request) -> Reply:
    return plain({"detail": "Not Found"}, "404 Not Found")


NO_ROUTES: dict[str, Callable[[Request], Reply]] = {VLLM: missing, SGLANG: missing}


def reset(server: ScriptedServer, limit_s: float = 300.0) -> None:
    asyncio.run(reset_prefix_cache(RemoteServer(server.address), limit_s))


@pytest.mark.parametrize("body", [b"", b'{"success": true}', b"Cache flushed.\n", b"[1]"], ids=str)
@pytest.mark.parametrize("path", [VLLM, SGLANG])
def test_routes_of_servers(path: str, body: bytes) -> None:
    reply = Reply([head(Content_Length=len(body)) + body])
    with ScriptedServer(others={VLLM: missing} | {path: lambda _: reply}) as server:
        reset(server)
        assert [request.path for request in server.requests] == [VLLM, SGLANG][: 1 + (path == SGLANG)]


@pytest.mark.parametrize(
    "refusal",
    [plain({"success": False}), plain({"error": "there are running requests"}, "400 Bad Request")],
    ids=["vllm", "sglang"],
)
def test_the_reset_is_repeated_until_the_server_is_idle(refusal: Reply) -> None:
    replies = [refusal, refusal, EMPTY]
    with ScriptedServer(others={VLLM: lambda _: replies.pop(0)}) as server:
        reset(server)
    assert not replies


def test_a_server_that_keeps_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_reset, "_PAUSE_S", 200.0)  # there is no time for a second request
    refusal = plain({"error": {"message": "busy"}}, "400 Bad Request")
    with ScriptedServer(others={VLLM: lambda _: refusal}) as server, pytest.raises(EndpointError) as error:
        reset(server)
    text = str(error.value)
    assert "did not empty its prefix cache within 300 s (--reset_prefix_cache): POST /reset_prefix" in text
    assert "busy" in text and server.address in text


def test_a_server_without_a_route() -> None:
    with ScriptedServer(others=NO_ROUTES) as server, pytest.raises(EndpointError) as error:
        reset(server)
    text = str(error.value)
    assert "has no route to empty its prefix cache (--reset_prefix_cache)" in text
    assert VLLM in text and SGLANG in text and "VLLM_SERVER_DEV_MODE=1" in text


def test_a_server_that_does_not_answer() -> None:
    hanging = Reply([], "hang")
    server = ScriptedServer(others={VLLM: lambda _: hanging})
    with server, pytest.raises(EndpointError, match="no answer"):
        reset(server, 2.0)


def test_a_client_sends_it_before_the_test() -> None:
    with (
        ScriptedServer(others={VLLM: lambda _: EMPTY}) as server,
        core_of(server.address, "--reset_prefix_cache") as core,
    ):
        core.load()
        core.run_health_check()
        assert VLLM not in [request.path for request in server.requests]
        core.start_test()
        assert [request.path for request in server.requests].count(VLLM) == 1


def test_a_client_of_a_server_without_it_fails() -> None:
    with (
        ScriptedServer(others=NO_ROUTES) as server,
        core_of(server.address, "--reset_prefix_cache") as core,
    ):
        core.load()
        core.run_health_check()
        with pytest.raises(RunError, match="has no route to empty its prefix cache"):
            core.start_test()
