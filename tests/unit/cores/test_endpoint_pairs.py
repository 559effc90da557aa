"""SGLang's context and generation servers: both get each request, and a failure of either ends it."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from typing import Any

import pytest

from mpillm.cores.base import LLMCore
from mpillm.cores.capabilities import FindsServers
from mpillm.cores.openai_client.call import Call
from mpillm.cores.openai_client.client import Client
from mpillm.cores.openai_client.dialect import Sampling
from mpillm.cores.openai_client.disagg_protocol import BootstrapProtocol
from mpillm.cores.openai_client.endpoint import EndpointError, RemoteServer
from mpillm.cores.openai_client.http_connection import HttpConnection
from mpillm.errors import RunError
from mpillm.report.validity_checks import doubts, failed_checks, server_checks
from tests.helpers.endpoint_cores import CANCELLED, FINAL, PROMPTS, SERVER, Rows, core_of, failure, requests
from tests.helpers.scripted_server import (
    MODEL,
    STREAM,
    Reply,
    Request,
    ScriptedServer,
    answer_of,
    choice,
    chunk,
    event,
    head,
    plain,
)
from tests.helpers.small_sglang import ALONE, ContextServer, GenerationServer, Server, error
from tests.helpers.support import wait_until

LONG_S = 60.0
HANG = Reply([], "hang")
FAILED = error("Prefill transfer failed for request", "500 Internal Server Error")
Answer = Callable[[Request], Reply]


@contextmanager
def pair(
    *options: object, context: Answer | None = None, generation: Answer | None = None, **fields: Any
) -> Iterator[tuple[LLMCore, ContextServer, GenerationServer]]:
    """Yield a core in the test, and its servers. `context`, `generation`: how these answer in the test."""
    context_server, generation_server = ContextServer(LONG_S), GenerationServer(LONG_S)
    servers: tuple[Server, ...] = (context_server, generation_server)
    with ExitStack() as stack:
        for server in reversed(servers):  # the context server stops first: the other one waits for it
            stack.enter_context(server.http)
        more: dict[str, Any] = {
            "server": 0,
            "context_servers": (1,),
            "protocol": "bootstrap_room",
            "names_model": True,
        }
        core = stack.enter_context(core_of("none:1", f"--model_path={MODEL}", *options, **more, **fields))
        assert isinstance(core, FindsServers)
        core.find_servers({0: servers[1].http.url, 1: servers[0].http.url})
        core.run_health_check()
        core.start_test()
        for server, answer in zip(servers, (context, generation), strict=True):
            server.http.completions = answer or server.answer
        yield core, context_server, generation_server


def post(url: str, body: dict[str, Any]) -> tuple[int, str]:
    """Return status and text of an answer."""
    connection = HTTPConnection(url.removeprefix("http://"), timeout=LONG_S)
    with closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        return response.status, response.read().decode()


def in_test(server: Server) -> list[dict[str, Any]]:
    """Return the requests, without those before the test."""
    return [body for body in server.http.bodies() if body.get("bootstrap_host") != ALONE]


def generated_tokens(core: LLMCore) -> int:
    metrics = core.metrics()
    assert metrics is not None
    return metrics.generated_tokens


def rooms(server: Server) -> list[int]:
    return [body["bootstrap_room"] for body in in_test(server)]


@pytest.mark.parametrize("scenario", ["Offline", "Server"])
def test_both_servers_get_each_request(scenario: str) -> None:
    with pair(f"--scenarios={scenario}") as (core, context, generation):
        core.enqueue(requests())
        rows = Rows(core).until(len(PROMPTS))
        core.flush()
        result: dict[str, Any] = {"per_instance": [{"samples": len(PROMPTS), **core.statistics()}]}
        bodies = in_test(context)
    assert sorted(rooms(context)) == sorted(rooms(generation)) and len(set(rooms(context))) == len(PROMPTS)
    assert {one["bootstrap_port"] for one in bodies} == {context.bootstrap_port}
    assert not any("stream" in one or "stream_options" in one for one in bodies)
    assert {bool(one.get("stream")) for one in in_test(generation)} == {scenario == "Server"}
    answers: dict[int, list[int]] = {}
    for id_, flags, tokens in rows:
        if flags & FINAL:
            answers[id_] = tokens
    assert answers == {10 + i: answer_of(prompt, 4) for i, prompt in enumerate(PROMPTS)}
    (client,) = result["per_instance"]
    assert client["handed_over"] == client["server_context_transfers"] == len(PROMPTS)
    assert client["server_failed_transfers"] == 0 and client["retries"] == 0
    result["server_checks"] = server_checks(result)
    assert failed_checks(result) == [] and doubts(result, others_serve=True) == []
    assert result["server_checks"]["contexts_arrived"] == "", "its context servers count transfers"
    assert result["server_checks"]["server_totals"] == ""


def test_the_answer_waits_for_both_servers() -> None:
    """The context server's only token may have no text."""
    may_end = threading.Event()

    def late(request: Request) -> Reply:
        context.answer(request)
        assert may_end.wait(LONG_S)
        return plain({**choice(None, "", "length"), "usage": {"prompt_tokens": 2, "completion_tokens": 1}})

    with pair(SERVER, context=late) as (core, context, generation):
        core.enqueue(requests([[5, 6]]))
        rows = Rows(core)
        wait_until(lambda: generated_tokens(core) == 4, "the end of the answer")
        assert not rows.poll() and generation.counts["num_requests_total"] == 1
        may_end.set()
        rows.until(1)


def test_a_failed_context_ends_the_request() -> None:
    with pair(context=lambda _: FAILED, generation=lambda _: HANG) as (core, context, generation):
        core.enqueue(requests([[5, 6]]))
        text = failure(core)
        assert f"{context.http.url}/v1/completions: HTTP 500: Prefill transfer failed" in text
        assert text.endswith(f"; generation server: {generation.http.url}")
        lost = {record["role"]: record["lost_prompt_tokens"] for record in core.statistics()["servers"]}
        assert lost == {"context": 0, "generation": 2}, "the open request is closed"


@pytest.mark.parametrize("streamed", [True, False])
def test_a_failed_generation_server_ends_the_request(streamed: bool) -> None:
    message = {"error": {"object": "error", "message": "Decode transfer failed", "code": 500}}
    reply = (
        Reply([STREAM, chunk(event(message))]) if streamed else plain(message, "500 Internal Server Error")
    )
    with pair(SERVER, context=lambda _: HANG, generation=lambda _: reply) as (core, context, generation):
        core.enqueue(requests([[5, 6]]))
        text = failure(core)
        assert text.startswith(f"{generation.http.url}/v1/completions: ") and "Decode transfer failed" in text
        assert text.endswith(f"; context server: {context.http.url}")


def once(reply: Reply, server: Callable[[], Server]) -> Answer:
    """Give `reply` to the first request."""
    first = iter([reply])
    return lambda request: next(first, None) or server().answer(request)


BUSY = Reply([head("503 Service Unavailable", Content_Length=0, Retry_After=0)])


@pytest.mark.parametrize("whose", ["context", "generation"])
@pytest.mark.parametrize("reply", [Reply([], "close"), BUSY], ids=["disconnects", "is busy"])
def test_a_request_that_did_not_begin_is_sent_again_to_both(whose: str, reply: Reply) -> None:
    """The room of the first attempt may be in use at the other server."""
    servers: dict[str, Server] = {}
    answers = {whose: once(reply, lambda: servers[whose])}
    with pair(SERVER, **answers) as (core, context, generation):
        servers |= {"context": context, "generation": generation}
        core.enqueue(requests([[5, 6]]))
        rows = Rows(core).until(1)
        statistics = core.statistics()
    (tokens,) = [tokens for _, flags, tokens in rows if flags & FINAL]
    assert tokens == answer_of([5, 6], 4)
    assert statistics["retries"] == 1 and statistics["handed_over"] == 1
    at = {"context": rooms(context), "generation": rooms(generation)}
    (other,) = at.keys() - {whose}
    first, second = at[whose]
    assert first != second, "another room"
    assert second in at[other], "it may read the first request later"


class SlowToConnect(RemoteServer):
    """A server whose connections are complete only after `may_connect`."""

    may_connect: asyncio.Event

    async def _connect(self, limit_s: float = LONG_S) -> HttpConnection:
        await self.may_connect.wait()
        return await super()._connect(limit_s)


class Outcome:
    """Listener for one call."""

    def __init__(self) -> None:
        self.call: asyncio.Future[Call] = asyncio.get_running_loop().create_future()

    def on_first(self, call: Call) -> None:
        pass

    def on_done(self, call: Call) -> None:
        self.call.set_result(call)

    def on_failed(self, call: Call, error: EndpointError) -> None:
        self.call.set_exception(error)

    def on_cancelled(self, call: Call) -> None:
        self.call.cancel()


def test_a_request_that_is_sent_again_before_it_has_a_connection_is_sent_once() -> None:
    """The server got it over the first attempt's connection, and over the second's."""
    replies = iter([BUSY])
    empty = plain({**choice(None, "", "length"), "usage": {"prompt_tokens": 2, "completion_tokens": 1}})

    async def answered(context: ScriptedServer, generation: ScriptedServer) -> list[int]:
        endpoint, outcome = SlowToConnect(generation.url), Outcome()
        endpoint.may_connect = asyncio.Event()
        contexts = [RemoteServer(context.url)]
        client = Client([endpoint], outcome, str, True, LONG_S, LONG_S, contexts, BootstrapProtocol())
        client.submit(1, [5, 6], Sampling(max_tokens=4))
        while len(context.bodies()) < 2:
            await asyncio.sleep(0.01)
        endpoint.may_connect.set()
        call = await asyncio.wait_for(outcome.call, LONG_S)
        assert client.retries == 1 and not endpoint.calls
        client.close()
        return call.answer.tokens

    with ScriptedServer(lambda _: next(replies, empty)) as context, ScriptedServer() as generation:
        assert asyncio.run(answered(context, generation)) == answer_of([5, 6], 4)
        assert len(generation.bodies()) == 1


def test_a_context_that_breaks_in_the_middle() -> None:
    half = Reply([head(Content_Length=99), b"{"], "close")
    with pair(SERVER, context=lambda _: half, generation=lambda _: HANG) as (core, context, generation):
        core.enqueue(requests([[5, 6]]))
        text = failure(core)
    assert "it closed the connection in the middle of the answer" in text
    assert context.http.url in text and generation.http.url in text


def test_a_cancelled_request_ends_at_both_servers() -> None:
    """Both count a failure, as SGLang does when a client disconnects before the transfer."""
    with pair(SERVER, context=lambda _: HANG, generation=lambda _: HANG) as (core, context, generation):
        core.enqueue(requests([[5, 6]]))
        wait_until(lambda: len(rooms(context)) == len(rooms(generation)) == 1, "both requests")
        core.cancel([10])
        (row,) = Rows(core).until(1)
        assert row[1] & CANCELLED
        context.counts["num_bootstrap_failed_reqs_total"] += 1
        generation.counts["num_transfer_failed_reqs_total"] += 1
        core.flush()
        statistics = core.statistics()
    assert [record["lost_prompt_tokens"] for record in statistics["servers"]] == [2, 2]
    assert statistics["server_failed_transfers"] == statistics["server_context_failed_transfers"] == 1
    result = {"per_instance": [{"samples": 1, **statistics}]}
    assert server_checks(result)["no_failed_transfers"] == ""


def test_a_silent_context_server() -> None:
    options = SERVER, "--stall_timeout=1"
    with pair(*options, context=lambda _: HANG) as (core, context, generation):
        core.enqueue(requests([[5, 6]]))
        text = failure(core)
    assert re.match(rf"{context.http.url}/v1/completions: silent for [\d.]+ s, with 1 outstanding", text)
    assert text.endswith(f"; generation server: {generation.http.url}")


def test_a_server_that_is_no_context_server() -> None:
    words = "disaggregation_mode decode, disaggregation_bootstrap_port 8998; expected prefill and a port"
    with ExitStack() as stack:
        urls = [stack.enter_context(GenerationServer(LONG_S).http).url for _ in range(2)]
        more: dict[str, Any] = {"server": 0, "context_servers": (1,), "protocol": "bootstrap_room"}
        core = stack.enter_context(core_of("none:1", f"--model_path={MODEL}", **more))
        assert isinstance(core, FindsServers)
        core.find_servers(dict(enumerate(urls)))
        with pytest.raises(RunError, match=f"{urls[1]}/server_info: {words}"):
            core.run_health_check()


def test_bootstrap_fields() -> None:
    protocol = BootstrapProtocol()
    one, other = protocol.params("::1", 7), protocol.params("h", 7)
    assert (one["bootstrap_host"], other["bootstrap_host"], one["bootstrap_port"]) == ("[::1]", "h", 7)
    assert one["bootstrap_room"] != other["bootstrap_room"] and 0 <= one["bootstrap_room"] < 1 << 63


BODY = {"prompt": [5, 6], "max_tokens": 4}


class TestTheFake:
    """It must not answer what SGLang would not."""

    def test_without_bootstrap_fields(self) -> None:
        for server in (ContextServer(LONG_S), GenerationServer(LONG_S)):
            with server.http:
                assert post(server.http.url, BODY)[0] == 400
                assert post(server.http.url, {**BODY, "bootstrap_room": 1, "bootstrap_host": "h"})[0] == 400

    @pytest.mark.parametrize("numbers", [(1, None), (None, 1), (1, 2)])
    def test_one_alone_or_in_another_room(self, numbers: tuple[int | None, int | None]) -> None:
        servers = ContextServer(0.2), GenerationServer(0.2)
        at = {"bootstrap_host": "127.0.0.1", "bootstrap_port": servers[0].bootstrap_port}
        with servers[0].http, servers[1].http:
            for server, number in zip(servers, numbers, strict=True):
                if number is not None:
                    status, text = post(server.http.url, {**BODY, **at, "bootstrap_room": number})
                    assert status == 500 and "transfer failed" in text
