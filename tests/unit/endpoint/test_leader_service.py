"""The leader before servers that do what they are told, right or wrong."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import ClientSession, ConnectionTimeoutError

from disagg.instances import ServedInstance
from mpillm.endpoint.admission import Guard
from mpillm.endpoint.leader import server_request
from mpillm.endpoint.leader.leader_service import LeaderService
from mpillm.endpoint.leader.workers import Worker, new_session, wait_ready
from mpillm.roles.pool import InstancePool
from mpillm.roles.prefix_pool import PrefixPool, PrefixRouting
from tests.helpers.endless_server import ENDLESS
from tests.helpers.led_servers import (
    BODY,
    Completions,
    answering,
    context,
    generation,
    led,
)
from tests.helpers.scripted_server import (
    STREAM,
    Reply,
    Request,
    ScriptedServer,
    choice,
    chunk,
    event,
    head,
    plain,
)


def test_a_request_goes_to_both_kinds() -> None:
    async def run() -> None:
        async with led() as it:
            status, text = await it.ask(BODY)
            assert (status, json.loads(text)) == (200, choice([7, 8, 9], "ttt", "length"))
            status, text = await it.ask({**BODY, "stream": True, "stream_options": {"include_usage": True}})
            assert status == 200 and text.endswith("data: [DONE]\n\n") and text.count("data: ") == 3
            (first, second), (third, fourth) = it.bodies(0), it.bodies(1)
            assert first["disaggregated_params"]["request_type"] == "context_only"
            assert (second["stream"], "stream_options" in second) == (False, False)
            assert third["prompt"] == [1, 2] and third["disaggregated_params"] == {
                "request_type": "generation_only",
                "first_gen_tokens": [7],
                "encoded_opaque_state": "state",
                "disagg_request_id": first["disaggregated_params"]["disagg_request_id"],
            }
            assert fourth["stream_options"] == {"include_usage": True}

    asyncio.run(run())


def test_an_answer_that_ends_with_its_first_token() -> None:
    async def run() -> None:
        async with led([lambda request: context(request, "stop")]) as it:
            status, text = await it.ask(BODY)
            assert status == 200 and json.loads(text) == choice([7], "t", "stop")
            status, text = await it.ask({**BODY, "stream": True})
            assert text == f"data: {json.dumps(choice([7], 't', 'stop'))}\n\ndata: [DONE]\n\n"
            assert it.bodies(1) == []

    asyncio.run(run())


def test_metrics() -> None:
    async def run() -> None:
        def fails(request: Request) -> Reply:
            return context(request) if request.json["max_tokens"] == 3 else plain({}, "500 Broken")

        async with led([fails]) as it:
            await it.ask(BODY)
            await it.ask({**BODY, "stream": True})
            assert (await it.ask({**BODY, "max_tokens": 4}))[0] == 500
            it.servers[1].stop()
            assert (await it.ask(BODY))[0] == 503
            async with it.session.get(f"{it.base}/metrics") as response:
                assert response.content_type == "text/plain"
                lines = (await response.text()).splitlines()
            values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))

            def value(name: str, *labels: str) -> float:
                every = ",".join(('server_role="leader"', *labels))
                return float(values[f"mpillm:{name}{{{every}}}"])

            assert [value("http_responses_total", f'status="{n}"') for n in (200, 500, 503)] == [2, 1, 1]
            assert value("num_requests_running") == 0
            counts = ("time_to_first_token_seconds_count", "e2e_request_latency_seconds_count")
            assert [value(name) for name in counts] == [1, 2]
            for i, (kind, n, up) in enumerate((("context", 4, 1), ("generation", 3, 0))):
                server = f'{{server="http://{it.servers[i].address}",kind="{kind}"}}'
                names = ("server_requests_total", "server_requests_running", "server_up")
                assert [float(values[f"mpillm:{name}{server}"]) for name in names] == [n, 0, up]

    asyncio.run(run())


def test_errors_of_its_own_are_as_those_of_a_server() -> None:
    async def run() -> None:
        async with led() as it:
            async with it.session.get(f"{it.base}/v1/completions") as response:
                assert (response.status, response.headers["Allow"]) == (405, "POST")
                assert "GET /v1/completions" in (await response.json())["error"]["message"]
            status, text = await it.ask({**BODY, "user": "x" * (1 << 24)})
            assert (status, json.loads(text)["error"]["code"]) == (413, "body_too_large")

    asyncio.run(run())


def test_routers() -> None:
    async def run() -> None:
        async with led([context, context]) as it:
            for _ in range(4):
                await it.ask(BODY)
            assert [len(it.bodies(i)) for i in (0, 1)] == [2, 2]

        def by_prefix(which: list[int]) -> InstancePool:
            return PrefixPool(which, PrefixRouting(4, 64))

        async with led([context, context], router=by_prefix) as it:
            for prompt in ([*range(20)], [*range(50, 70)]) * 4:
                await it.ask({"prompt": prompt})
            assert [len({tuple(body["prompt"]) for body in it.bodies(i)}) for i in (0, 1)] == [1, 1]

    asyncio.run(run())


def test_a_host_that_does_not_answer_is_named_and_others_get_its_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A connection that is not made in time: nothing was sent, so it is no silent answer."""

    async def run() -> None:
        async with led([context, context]) as it:
            request, unreachable = ClientSession.request, it.servers[0].address

            def request_or_timeout(session: ClientSession, method: str, url: str, **words: Any) -> Any:
                if unreachable in url:
                    raise ConnectionTimeoutError(f"Connection timeout to host {url}")
                return request(session, method, url, **words)

            with monkeypatch.context() as patch:
                patch.setattr(ClientSession, "request", request_or_timeout)
                for _ in range(2):
                    service = await ClientSession.post(it.session, f"{it.base}/v1/completions", json=BODY)
                    assert service.status == 200
                it.servers[1].stop()
                message = await it.error(503, BODY)
            assert f"{it.names[0]} does not answer: no answer in time" in message

    asyncio.run(run())


def test_a_server_that_is_gone_is_named_and_others_get_its_requests() -> None:
    async def run() -> None:
        async with led([context, context]) as it:
            it.servers[0].stop()
            for _ in range(4):
                assert (await it.ask(BODY))[0] == 200
            it.servers[2].stop()
            refused = "does not answer: Connection refused"
            message = await it.error(503, BODY)
            assert message == f"{it.names[2]} {refused}" and it.names[2].startswith(
                "generation instance 2 at"
            )
            it.servers[1].stop()
            for _ in range(2):
                message = await it.error(503, BODY)
            assert it.names[2] in message
            async with it.session.get(it.base + "/health") as response:
                assert response.status == 503

    asyncio.run(run())


@pytest.mark.parametrize(("max_retries", "status"), [(0, 503), (1, 503), (2, 200), (None, 200)])
def test_the_yaml_limits_the_number_of_other_servers_that_are_tried(
    max_retries: int | None, status: int
) -> None:
    async def run() -> None:
        async with led([context] * 3, max_retries=max_retries) as it:
            for server in it.servers[:2]:
                server.stop()
            assert (await it.ask(BODY))[0] == status

    asyncio.run(run())


SERVER_ERROR = plain({"error": {"message": "no room"}}, "500 Internal Server Error")
BUSY = plain({"error": {"message": "come again"}}, "429 Too Many Requests", Retry_After=3)


def _silence_s(kind: str, reply: Reply) -> float:
    return 0.3 if (kind, reply.then) == ("context", "hang") else 60.0


@pytest.mark.parametrize("kind", ["context", "generation"])
@pytest.mark.parametrize(
    ("reply", "status", "message"),
    [
        (SERVER_ERROR, 500, "^no room$"),
        (BUSY, 429, "^come again$"),
        (plain({"error": "x" * 70_000}, "400 Bad Request"), 502, "its answer is longer than 65536 bytes"),
        (Reply([head(Content_Length=100) + b"{"], "close"), 502, "was lost while it answered"),
        (Reply([], "close"), 502, "was lost while it answered: it closed the connection"),
        (Reply([], "hang"), 504, r"it was silent for 0\.3 s \(--stall_timeout\)"),
    ],
)
def test_a_server_that_fails(kind: str, reply: Reply, status: int, message: str) -> None:
    async def run() -> None:
        def last(request: Request) -> Reply:
            if reply.then == "hang":  # from now on servers must not be silent for long
                for service in services:
                    service._silence_s = 0.3
            return context(request)

        services: list[LeaderService] = []
        if kind == "context":
            scripts: tuple[list[Completions], list[Completions]] = [answering(reply)], [generation]
        else:
            scripts = [last], [answering(reply)]
        async with led(*scripts, silence_s=_silence_s(kind, reply), services=services) as it:
            found = await it.error(status, BODY)
            name = it.names[0 if kind == "context" else 1]
            assert found.startswith(name) == (reply not in (SERVER_ERROR, BUSY))
            assert re.search(message, found), found

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["context", "generation"])
def test_a_server_that_names_another_address_sends_nothing_there(kind: str) -> None:
    """A redirection would have the leader send prompts, and the key, to any address."""

    async def run() -> None:
        with ScriptedServer(others={"/health": answering(plain({}))}) as elsewhere:
            there = answering(plain({}, "307 Temporary Redirect", Location=f"{elsewhere.url}/v1/completions"))
            scripts = ([there], [generation]) if kind == "context" else ([context], [there])
            async with led(*scripts) as it:
                named = it.names[kind == "generation"]
                assert await it.error(502, BODY) == f"{named}: it redirects (HTTP 307)"
                status, _ = await it.ask({**BODY, "stream": True})
                assert status == 502
            health = Worker(ServedInstance(0, "context", "context_servers", elsewhere.address, range(1)))
            away = answering(plain({}, "302 Found", Location=f"{elsewhere.url}/health"))
            with ScriptedServer(others={"/health": away}) as server:
                health.base = server.url
                async with ClientSession() as session:
                    assert not await health.check(session)
            assert health.failure == "its health check returns 302"
            assert elsewhere.requests == []

    asyncio.run(run())


def test_a_servers_cookies_are_not_kept() -> None:
    """They would have filled the leader's memory, and each further request."""

    async def run() -> None:
        with ScriptedServer(others={"/health": answering(plain({}, Set_Cookie="a=b"))}) as server:
            at = f"http://localhost:{server.address.rpartition(':')[2]}/health"
            async with new_session() as session:
                for _ in range(2):
                    await (await session.get(at)).read()
        assert len(server.requests) == 2 and not any("cookie" in one.headers for one in server.requests)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply([head(Content_Length=4) + b"no, "]), "its answer is not a JSON object"),
        (plain({"choices": []}), "its answer must have one choice"),
        (
            plain({"choices": [{"finish_reason": "not_finished", "disaggregated_params": "none"}]}),
            "its disaggregated_params are not an object",
        ),
    ],
)
def test_an_answer_of_a_context_server_that_makes_no_sense(reply: Reply, message: str) -> None:
    async def run() -> None:
        async with led([answering(reply)]) as it:
            assert await it.error(502, BODY) == f"{it.names[0]}: {message}"

    asyncio.run(run())


def test_a_generation_server_that_is_lost_in_a_stream() -> None:
    async def run() -> None:
        cut = Reply([STREAM, chunk(event(choice([7], "t")))], "close")
        async with led(generations=[answering(cut)]) as it:
            status, text = await it.ask({**BODY, "stream": True})
            *_, last, end = text.split("\n\n")
            error = json.loads(last.removeprefix("data: "))["error"]
            assert (status, end) == (200, "")
            assert error["message"].startswith(f"{it.names[1]} was lost while it answered")

    asyncio.run(run())


def without_end(first: bytes, piece: bytes, pause_s: float = 0.0) -> Reply:
    def pieces() -> Iterator[bytes]:
        yield first
        while True:
            yield piece
            time.sleep(pause_s)

    return Reply(pieces())


@pytest.mark.long
@pytest.mark.parametrize("kind", ["context", "generation"])
@pytest.mark.parametrize("way", [*ENDLESS, "a drop at a time", "a head, a drop at a time"])
def test_an_answer_without_end_is_given_up(kind: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_request, "MAX_ANSWER_BYTES", 1 << 22)
    monkeypatch.setattr(server_request, "_CONNECT_S", 1.0)
    slow = {"a drop at a time": ENDLESS["a body of gigabytes"][0], "a head, a drop at a time": b""}
    reply = without_end(slow[way], b"H", 0.1) if way in slow else without_end(*ENDLESS[way])

    async def run() -> None:
        contexts = [answering(reply)] if kind == "context" else [context]
        generations = [answering(reply)] if kind == "generation" else [generation]
        async with led(contexts, generations, silence_s=3.0) as it:
            status, text = await it.ask(BODY)
            message = json.loads(text)["error"]["message"]
            assert status in (502, 504) and message.startswith(it.names[kind == "generation"]), text
            assert len(message) < 400 and re.search(
                "longer than 4194304 bytes|sent data, but no answer|was lost while it answered",
                message,
            )

    asyncio.run(run())


@pytest.mark.parametrize(
    ("piece", "pause_s", "silence_s", "message"),
    [
        (chunk(b": still here\n\n"), 0.1, 1.0, "sent data, but no answer, for 1 s"),
        (chunk(b"x" * (1 << 16)), 0.0, 300.0, "bytes without an event"),
        (chunk(event(choice([7], "t")) * 100), 0.0, 300.0, r"more than 208 events"),
    ],
    ids=["comments", "no event", "too many events"],
)
def test_a_stream_without_end_is_given_up(
    piece: bytes, pause_s: float, silence_s: float, message: str
) -> None:
    async def run() -> None:
        reply = without_end(STREAM, piece, pause_s)
        async with led(generations=[answering(reply)], silence_s=silence_s) as it:
            _, text = await it.ask({**BODY, "stream": True})
            last = text.split("\n\n")[-2].removeprefix("data: ")
            assert re.search(message, json.loads(last)["error"]["message"])

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "the body must be an object; it is an array"),
        ({"disaggregated_params": {"request_type": "context_only"}}, "only the leader sets them"),
        ({**BODY, "stream_options": 5}, "stream_options 5: expected an object"),
        ({**BODY, "stream_options": {"include_usage": 5}}, "include_usage 5: expected true or false"),
        ({**BODY, "stream": "yes"}, 'stream "yes": expected true or false'),
    ],
)
def test_bodies_that_are_refused(body: Any, message: str) -> None:
    """No server gets a request: it would keep a KV cache that nobody fetches."""

    async def run() -> None:
        async with led() as it:
            assert message in await it.error(400, body)
            assert it.bodies(0) == []

    asyncio.run(run())


def test_servers_that_are_not_ready_in_time_are_known() -> None:
    async def run() -> None:
        with ScriptedServer(others={"/health": answering(plain({}, "503 Service Unavailable"))}) as server:
            late = Worker(ServedInstance(3, "context", "context_servers", server.address, range(1)))
            async with new_session() as session:
                assert await wait_ready(session, [late], 0.2, lambda text: None) == [late]
            assert late.failure == "its health check returns 503"

    asyncio.run(run())


def test_the_key_is_checked_before_a_body_is_read() -> None:
    async def run() -> None:
        async with led(guard=Guard("sesame", 1000)) as it:
            for path, status in (
                *(("/health", 200), ("/metrics", 200), ("/version", 200)),
                *(("/v1/models", 401), ("/v1/completions", 401), ("/nowhere", 401)),
            ):
                async with it.session.get(it.base + path) as response:
                    assert response.status == status, path
            host, port = it.base.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
            writer.close()
            headers = {"Authorization": "Bearer sesame"}
            async with it.session.post(it.base + "/v1/completions", json=BODY, headers=headers) as response:
                assert response.status == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    ("version", "expect", "begins"),
    [
        ("1.1", "100-continue", "HTTP/1.1 100 "),
        ("1.1", "more", "HTTP/1.1 417 "),
        ("1.0", "100-continue", "HTTP/1.0 200 "),
    ],
)
def test_a_held_back_body(version: str, expect: str, begins: str) -> None:
    """As `serve` does; the error has OpenAI's form."""

    async def test() -> None:
        async with led() as a:
            data = json.dumps(BODY).encode()
            reader, writer = await asyncio.open_connection(*a.base.removeprefix("http://").split(":"))
            head = f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\nExpect: {expect}\r\n"
            writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode())
            await asyncio.sleep(0.05)
            writer.write(data)
            got = (await reader.read()).decode()
            assert got.startswith(begins)
            assert "417" not in begins or json.loads(got.partition("\r\n\r\n")[2])["error"]["message"]
            writer.close()

    asyncio.run(test())
