"""What the server says beside answers: errors, routes, keys, limits, metrics and times."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import threading
import time
from typing import Any

import aiohttp
import numpy as np
import pytest

from mpillm.comms.messages import RESPONSE, Batch, Refusal, ResponseFlag
from mpillm.cores.openai_client.server_counts import reading_of
from mpillm.data.dataset import PromptLimits
from mpillm.data.tokenizer import ByteTokenizer
from mpillm.endpoint import admission, http_thread
from mpillm.endpoint.protocol import ServedModel
from tests.helpers.http_api import BOTH, HOUR_MS, ROUTES, Api, api, body_for, run

WRONG: list[tuple[str, dict[str, Any]]] = [
    ("n", {"n": 0}),
    ("n", {"n": 129}),
    ("n", {"n": True}),
    ("tools", {"tools": ["f"]}),
    ("tool_choice", {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}),
    ("logprobs", {"logprobs": 0}),
    ("logprobs", {"logprobs": True}),
    ("echo", {"echo": True}),
    ("suffix", {"suffix": "x"}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"enable_thinking": False}}),
    ("reasoning_effort", {"reasoning_effort": "low"}),
    ("documents", {"documents": [{"text": "x"}]}),
    ("presence_penalty", {"presence_penalty": 0.5}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": 1.5}),
    ("max_tokens", {"max_tokens": True}),
    ("max_tokens", {"max_tokens": 10**400}),
    ("temperature", {"temperature": -1}),
    ("temperature", {"temperature": "hot"}),
    ("top_p", {"top_p": 0}),
    ("top_p", {"top_p": 1.1}),
    ("top_k", {"top_k": -2}),
    ("seed", {"seed": 2.5}),
    ("min_tokens", {"min_tokens": 9, "max_tokens": 8}),
    ("stop", {"stop": [1]}),
    ("stop", {"stop": ["x"] * 65}),
    ("stop", {"stop": ["x" * 17] * 64}),
    ("stop_token_ids", {"stop_token_ids": [256]}),
    ("stream", {"stream": "yes"}),
    ("stream_options", {"stream_options": []}),
    ("include_usage", {"stream_options": {"include_usage": 1}}),
    ("ignore_eos", {"ignore_eos": 1}),
]
WRONG_PROMPTS: list[Any] = [
    None,
    5,
    "",
    [],
    [[]],
    [256],
    [-1],
    [1.5],
    [True],
    ["a", 5],
    {"a": 1},
    "\ud800",
    "x" * 200,
]
WRONG_MESSAGES: list[Any] = [
    None,
    "hi",
    [],
    ["hi"],
    [{"content": "hi"}],
    [{"role": "user"}],
    [{"role": "user", "content": [{"type": "image_url"}]}],
]


@ROUTES
def test_wrong_parameters_are_named(path: str) -> None:
    """The answer has status 400 and the parameter's name, and nothing is left behind."""

    async def test() -> None:
        async with api() as a:
            for param, more in WRONG:
                error = await a.error(400, path, body_for(path) | more)
                assert (
                    error["param"] == param
                    and error["type"] == "invalid_request_error"
                    and param in error["message"]
                )
            for body in (b"", b"{", b"\xff", b"[" * 100_000, b"[]", b'"text"', b"1" * 5000):
                assert "body" in (await a.error(400, path, body))["message"]
            for prompt in WRONG_PROMPTS:
                assert (await a.error(400, "/v1/completions", {"prompt": prompt}))["param"] == "prompt"
            for messages in WRONG_MESSAGES:
                assert (await a.error(400, "/v1/chat/completions", {"messages": messages}))[
                    "param"
                ] == "messages"
            too_long = await a.error(400, path, body_for(path, "x" * 150) | {"max_tokens": 51})
            assert too_long["code"] == "context_length_exceeded" and "200 tokens" in too_long["message"]
            assert (await a.error(404, path, body_for(path) | {"model": "gpt"}))["code"] == "model_not_found"
            harmless = {
                "n": 1,
                "best_of": 1,
                "echo": False,
                "logprobs": False,
                "tools": [],
                "user": "me",
                "logit_bias": {},
                "top_k": -1,
            }
            await a.answer(
                path,
                **body_for(path),
                **harmless,
                temperature=1e-30,
                top_p=1e-30,
                seed=-1,
                stop=None,
                max_tokens=2,
            )
            await a.idle()

    run(test)


def test_a_shorter_limit_of_prompts_is_in_the_model_card() -> None:
    """If a prompt must fit one step, the card has this limit beside the context length."""

    async def test() -> None:
        limits = PromptLimits(vocab_size=256, max_seq_len=200, max_prompt_len=100)
        async with api(served=ServedModel(("dummy",), ByteTokenizer(), limits)) as a:
            async with a.session.get(a.base + "/v1/models/dummy") as response:
                card = await response.json()
            assert (card["max_model_len"], card["max_prompt_len"]) == (200, 100)
            await a.answer("/v1/completions", prompt="x" * 100, max_tokens=2)
            error = await a.error(400, "/v1/completions", {"prompt": "x" * 101})
            assert error["code"] == "context_length_exceeded"

    run(test)


def test_routes_and_methods() -> None:
    async def test() -> None:
        async with api() as a:
            async with a.session.get(a.base + "/v1/models") as response:
                cards = (await response.json())["data"]
                assert [card["id"] for card in cards] == ["dummy", "other"] and cards[0][
                    "max_model_len"
                ] == 200
            for path, status in (
                ("/health", 200),
                ("/version", 200),
                ("/v1/models/other", 200),
                ("/v1/models/x", 404),
                ("/x", 404),
            ):
                async with a.session.get(a.base + path) as response:
                    assert response.status == status
            async with a.session.get(a.base + "/v1/completions") as response:
                assert response.status == 405 and response.headers["Allow"] == "POST"
                assert (await response.json())["error"][
                    "message"
                ] == "GET /v1/completions: Method Not Allowed"

    run(test)


def test_the_id_of_a_request() -> None:
    async def test() -> None:
        async with api() as a:
            for stream in (False, True):
                body = {"prompt": "x", "max_tokens": 1, "stream": stream}
                async with await a.post("/v1/completions", body, **{"X-Request-Id": "mine-1"}) as response:
                    assert (
                        response.headers["X-Request-Id"] == "mine-1"
                        and '"cmpl-mine-1"' in await response.text()
                    )
                async with await a.post("/v1/completions", body, **{"X-Request-Id": "not mine"}) as response:
                    assert len(response.headers["X-Request-Id"]) == 32

    run(test)


def test_the_key() -> None:
    async def test() -> None:
        async with api(api_key="sesame") as a:
            body = {"prompt": "x", "max_tokens": 1}
            for headers in (
                {},
                {"Authorization": "Bearer open"},
                {"Authorization": "Basic sesame"},
                {"Authorization": "Bearer \xe9"},
            ):
                assert (await a.error(401, "/v1/completions", body, **headers))["code"] == "invalid_api_key"
            async with await a.post("/v1/completions", body, Authorization="Bearer sesame") as response:
                assert response.status == 200
            for path, status in (
                ("/health", 200),
                ("/metrics", 200),
                ("/version", 200),
                ("/v1/models", 401),
                ("/nowhere", 401),
                ("/perf_metrics", 401),
                ("/steady_clock_offset", 401),
            ):
                async with a.session.get(a.base + path) as response:
                    assert response.status == status
            await a.error(401, "/steady_clock_offset", {"offset": 5})
            key = {"Authorization": "Bearer sesame"}
            async with await a.post("/steady_clock_offset", {"offset": 5}, **key) as response:
                assert response.status == 200

    run(test)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:8000"}, 200),
        ({"Host": "LOCALHOST"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "10.0.0.1"}, 200),
        ({"Host": "evil.example:8000"}, 403),
        ({"Host": "localhost.evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Origin": "http://evil.example", "Content-Type": "text/plain"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
def test_no_page_that_a_browser_shows_gets_in_without_a_key(headers: dict[str, str], status: int) -> None:
    """Neither one that posts plain text, nor one whose name has become this machine's."""

    async def test() -> None:
        body = {"prompt": "x", "max_tokens": 1}
        async with api(host="127.0.0.1") as a, await a.post("/v1/completions", body, **headers) as response:
            assert response.status == status
        key = {"Authorization": "Bearer sesame"}
        async with (
            api(api_key="sesame", host="127.0.0.1") as a,
            await a.post("/v1/completions", body, **headers, **key) as response,
        ):
            assert response.status == 200

    run(test)


@pytest.mark.parametrize("depth", [50, 500, 975, 990, 2000, 100_000])
def test_what_is_nested_deep_is_the_clients_mistake(depth: int) -> None:
    async def test() -> None:
        async with api() as a:
            for name in ("prompt", "messages", "model", "stop", "logit_bias", "stream_options", "seed"):
                for deep in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
                    body = f'{{"prompt": "x", "{name}": {deep}}}'.encode()
                    for path in ("/v1/completions", "/v1/chat/completions"):
                        async with await a.post(path, body) as response:
                            assert response.status < 500, (name, path, await response.text())
            await a.idle()

    run(test)


def test_a_connection_without_a_whole_request_is_closed() -> None:
    async def test() -> None:
        async with api(idle_s=0.5) as a:
            for sent in (b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"):
                reader, writer = await asyncio.open_connection(*a.base.removeprefix("http://").split(":"))
                writer.write(sent)
                with contextlib.suppress(ConnectionResetError):  # closed before the head was read
                    assert await reader.read() == b""
                writer.close()

    run(test)


def test_a_body_that_does_not_come() -> None:
    async def test() -> None:
        async with api(body_s=0.5) as a:
            reader, writer = await asyncio.open_connection(*a.base.removeprefix("http://").split(":"))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
            answer = await reader.readuntil(b"}}")
            assert answer.startswith(b"HTTP/1.1 408 ") and b"the body did not arrive within 0.5 s" in answer
            writer.close()

    run(test)


def test_slow_bodies_do_not_block_other_clients() -> None:
    """The largest incomplete body is refused; received bytes count, not the announced length."""

    async def test() -> None:
        async with api(max_body_bytes=100_000) as a:
            strangers = []
            for _ in range(40):
                reader, writer = await asyncio.open_connection(*a.base.removeprefix("http://").split(":"))
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n")
                writer.write(b" " * 90_000)
                strangers.append((reader, writer))
            most = admission._BODIES * 100_000
            await a.until(lambda: a.service.guard._n_bytes > most - 100_000)
            await a.answer("/v1/completions", prompt="x" * 150, max_tokens=2)
            assert a.service.guard._n_bytes <= most
            n_refused = 0
            for reader, writer in strangers:
                with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                    n_refused += (await asyncio.wait_for(reader.readline(), 0.05)).startswith(
                        b"HTTP/1.1 429 "
                    )
                writer.close()
            assert n_refused >= 20
            await a.idle()
            assert a.service.guard._n_bytes == 0 and not a.service.guard._arriving

    run(test)


def test_a_server_that_ends_does_not_wait_for_bodies() -> None:
    async def test() -> None:
        async with api() as a:
            reader, writer = await asyncio.open_connection(*a.base.removeprefix("http://").split(":"))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
            await a.until(lambda: a.service.guard.active == 1)
            a.service.guard.drain()
            assert (await reader.readline()).startswith(b"HTTP/1.1 503 ")
            writer.close()
            await a.idle()

    run(test)


def test_a_client_that_reads_nothing_loses_its_connection() -> None:
    """The kernel sees to it, on each connection."""
    bound = http_thread.bind("127.0.0.1", 0)
    bound.listen()
    with bound, socket.create_connection(bound.getsockname()), bound.accept()[0] as accepted:
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 120_000


def test_limits_of_bodies_and_of_the_queue() -> None:
    async def test() -> None:
        async with api(core={"ttft_ms": HOUR_MS}, max_body_bytes=1000, max_queue_size=3) as a:
            assert "1000 bytes" in (await a.error(413, "/v1/completions", b"x" * 1001))["message"]
            packed = gzip.compress(b" " * 100_000)
            error = await a.error(415, "/v1/completions", packed, **{"Content-Encoding": "gzip"})
            assert error["message"] == "Content-Encoding gzip is not supported: send the body as it is"
            reader, writer = await asyncio.open_connection(*a.base.removeprefix("http://").split(":"))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 413 "), "without waiting for the body"
            writer.close()
            body = {"prompt": [[1], [2]]}
            waiting = asyncio.ensure_future(a.answer("/v1/completions", **body))
            await a.until(lambda: a.world.open.waiting == 2)
            async with await a.post("/v1/completions", body) as response:
                assert response.status == 429 and int(response.headers["Retry-After"]) > 0
                assert (await response.json())["error"]["type"] == "rate_limit_error"
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await a.idle()

    run(test)


def test_a_full_queue_has_room_for_a_client_of_another_address() -> None:
    """An eighth more, for those who have no more than that."""

    async def test() -> None:
        other = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))  # as all of 127.0.0.0/8, this machine's
        async with (
            api(core={"ttft_ms": HOUR_MS}, max_queue_size=16) as a,
            aiohttp.ClientSession(connector=other) as b,
        ):
            waiting = [asyncio.ensure_future(a.answer("/v1/completions", prompt=[[1]] * 4)) for _ in range(4)]
            await a.until(lambda: a.world.open.waiting == 16)
            await a.error(429, "/v1/completions", {"prompt": [1]})
            here = Api(a.world, a.service, b, a.base)
            await here.error(429, "/v1/completions", {"prompt": [[1]] * 3})
            waiting.append(asyncio.ensure_future(here.answer("/v1/completions", prompt=[[1]] * 2)))
            await a.until(lambda: a.world.open.waiting == 18)
            await here.error(429, "/v1/completions", {"prompt": [1]})
            await a.error(429, "/v1/completions", {"prompt": [1]})
            for one in waiting:
                one.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            await a.idle()
            assert not a.service._n_open

    run(test)


MILLION = ServedModel(("dummy",), ByteTokenizer(), PromptLimits(vocab_size=256, max_seq_len=1 << 20))


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1], "n": 128, "max_tokens": 1_000_000},
        {"prompt": [[1]] * 100, "max_tokens": 1_000_000},
        {"prompt": [1] * 1_000_000, "n": 128, "max_tokens": 500_000},
    ],
)
def test_what_would_take_too_much_memory(body: dict[str, Any]) -> None:
    """It is refused before anything is kept of it; a long answer is not, and counts while it is open."""
    body["prompt"] = body["prompt"][:500_000]

    async def test() -> None:
        async with api(served=MILLION, core={"ttft_ms": HOUR_MS}) as a:
            assert "too many for one request" in (await a.error(400, "/v1/completions", body))["message"]
            assert a.world.open.n_bytes == 0
            long = {"prompt": [1], "max_tokens": 1_000_000}
            waiting = [asyncio.ensure_future(a.answer("/v1/completions", **long)) for _ in range(53)]
            await a.until(lambda: len(a.world.open) == 53)
            assert (await a.error(429, "/v1/completions", long))["code"] == "queue_full"
            for one in waiting:
                one.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            await a.idle()
            assert a.world.open.n_bytes == 0

    run(test)


@pytest.mark.parametrize(
    "wide",
    [
        b'{"prompt": [%s]}' % b",".join([b"{}"] * 200_000),
        b"{%s}" % b",".join(b'"%x": 1' % i for i in range(200_000)),
        b'{"prompt": [%s]}' % b",".join([b"1"] * 4_300_000),
    ],
    ids=["objects", "names", "values"],
)
def test_a_wide_body_is_not_made_objects(wide: bytes) -> None:
    async def test() -> None:
        async with api() as a:
            assert "parts" in (await a.error(400, "/v1/completions", wide))["message"]
            text = '"{[:,\\' * 100_000  # what a text has is no part
            error = await a.error(400, "/v1/completions", json.dumps({"prompt": text}).encode())
            assert error["code"] == "context_length_exceeded"

    run(test)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", [None, "~"])
def test_a_long_answer_comes_in_slices(stream: bool, stop: str | None) -> None:
    """So that others' come between."""

    async def test() -> None:
        async with api(served=MILLION) as a:
            body: dict[str, Any] = {"prompt": [0], "max_tokens": 10_000, "return_token_ids": True}
            body |= {"stop": stop, "ignore_eos": True}
            if not stream:
                (made,) = (await a.answer("/v1/completions", **body))["choices"]
                tokens = made["token_ids"]
            else:
                chunks = await a.events("/v1/completions", **body)
                assert stop or len(chunks) >= 5
                tokens = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
                made = chunks[-1]["choices"][0]
            assert tokens == [*range(len(tokens))]
            assert (len(tokens), made["finish_reason"]) == (
                (10_000, "length") if stop is None else (ord("~") + 1, "stop")
            )
            await a.idle()

    run(test)


def test_the_core_that_refuses_and_the_server_that_ends() -> None:
    """The client is told before a stream and in the middle of one."""

    async def test() -> None:
        async with api(core={"ttft_ms": 0.5, "tpot_ms": HOUR_MS}) as a:
            body = {"prompt": "x", "max_tokens": 5, "stream": True}
            async with await a.post("/v1/completions", body) as response:
                await response.content.readuntil(b"\n\n")
                a.service.guard.drain()
                assert (await a.error(503, "/v1/completions", body))["code"] == "shutting_down"
                async with a.session.get(a.base + "/health") as health:
                    assert health.status == 503
                a.world.open.give_up_all()
                last = (await response.text()).strip()
                assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
            await a.idle()

    run(test)


def test_tokens_from_a_prefix_cache_are_counted_where_they_are_known() -> None:
    """A run against our server, too, could not be checked for them: nothing at all was said."""

    async def test() -> None:
        for counts in (False, True):
            async with api(counts_cached=counts) as a:
                await a.answer("/v1/completions", prompt=[1, 2], max_tokens=4)
                async with a.session.get(a.base + "/metrics") as response:
                    page = await response.text()
                assert reading_of(page).cached_tokens == (0 if counts else None)
                assert ("\nmpillm:prefix_cache_queries_total{" in page) is counts

    run(test)


def test_metrics() -> None:
    async def test() -> None:
        async with api(kv_cache_usage=lambda: 0.25) as a:
            await a.answer("/v1/completions", prompt=[1, 2], max_tokens=4)
            await a.events("/v1/completions", prompt=[3], max_tokens=5)
            await a.error(400, "/v1/completions", {})
            async with a.session.get(a.base + "/metrics") as response:
                assert response.content_type == "text/plain"
                lines = (await response.text()).splitlines()
            values = {
                line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
                for line in lines
                if not line.startswith("#")
            }
            label = 'model_name="dummy"'
            assert values[f"mpillm:prompt_tokens_total{{{label}}}"] == 3
            assert values[f"mpillm:generation_tokens_total{{{label}}}"] == 9
            assert values[f'mpillm:request_success_total{{{label},finished_reason="length"}}'] == 2
            assert values[f'mpillm:http_responses_total{{{label},status="400"}}'] == 1
            assert values[f"mpillm:kv_cache_usage_perc{{{label}}}"] == 0.25
            assert (
                values[f"mpillm:num_requests_running{{{label}}}"]
                == values[f"mpillm:num_requests_waiting{{{label}}}"]
                == 0
            )
            totals = a.service.metrics.totals  # for result.json
            assert totals.latency.summary_ms() is not None and totals.ttft.summary_ms() is not None
            for name in (
                "time_to_first_token_seconds",
                "e2e_request_latency_seconds",
                "request_generation_tokens",
            ):
                assert (
                    values[f'mpillm:{name}_bucket{{{label},le="+Inf"}}']
                    == values[f"mpillm:{name}_count{{{label}}}"]
                    == 2
                )

    run(test)


@BOTH
def test_times_of_the_last_requests_are_reported_once(disaggregated: bool) -> None:
    """The dummy core reports no times of its own: tests/e2e/test_serve.py has a core that does."""

    async def test() -> None:
        async with api(disaggregated, perf_metrics_max_requests=3) as a:
            for i in range(5):
                body = {"prompt": [1, 2, 3], "max_tokens": 4}
                async with await a.post("/v1/completions", body, **{"X-Request-Id": f"r{i}"}) as response:
                    assert response.status == 200
            await a.idle()
            async with a.session.get(f"{a.base}/perf_metrics") as response:
                metrics = await response.json()
            assert [one["request_id"] for one in metrics] == ["r2", "r3", "r4"]
            for one in metrics:
                times = one["perf_metrics"]["timing_metrics"]
                order = ["server_arrival_time", "arrival_time", "first_token_time", "last_token_time"]
                assert sorted(order, key=times.__getitem__) == order
                assert times["first_token_time"] == times["server_first_token_time"]
            async with a.session.get(f"{a.base}/perf_metrics") as response:
                assert await response.json() == []
            # A leader's clock is an hour ahead.
            async with a.session.get(f"{a.base}/steady_clock_offset") as response:
                clock = await response.json()
            assert 0 < clock["receive_ts"] <= clock["transmit_ts"]
            await a.error(400, "/steady_clock_offset", {"offset": "much"})
            async with await a.post("/steady_clock_offset", {"offset": 3600.0}) as response:
                assert response.status == 200
            await a.answer("/v1/completions", prompt="hello", max_tokens=4)
            await a.idle()
            async with a.session.get(f"{a.base}/perf_metrics") as response:
                (one,) = await response.json()
            metrics = one["perf_metrics"]["timing_metrics"]
            assert metrics["server_arrival_time"] > clock["transmit_ts"] + 3600 > times["last_token_time"]
            assert metrics["first_scheduled_time"] is None
        async with api(disaggregated) as a:
            await a.answer("/v1/completions", prompt="hello", max_tokens=4)
            async with a.session.get(f"{a.base}/perf_metrics") as response:
                assert await response.json() == []

    run(test)


@ROUTES
@pytest.mark.parametrize("streams", [False, True])
def test_a_refusal_of_another_server_is_passed_on(path: str, streams: bool) -> None:
    """The status is also the same: a stream has not sent its headers by then."""

    async def test() -> None:
        async with api() as a:
            for core in a.world.cores:
                core.enqueue = lambda requests: None  # type: ignore[method-assign]
            body = body_for(path) | {"stream": streams}
            for status, seconds, is_too_long in (
                (400, 0, False),
                (400, 0, True),
                (429, 70, False),
                (503, 0, False),
            ):
                asking = asyncio.ensure_future(a.post(path, body))
                await a.until(lambda: a.world.open.waiting == 1)
                (id_,) = a.world.open._answers
                numbers = Refusal(status, "no \N{SNOWMAN}", seconds, is_too_long).numbers()
                flags = ResponseFlag.FIRST | ResponseFlag.FINAL | ResponseFlag.ERROR
                rows = [(id_, len(numbers), ResponseFlag.REFUSED), (id_, 0, flags)]
                a.world.open.take(Batch(np.array(rows, RESPONSE), np.array(numbers, np.int32)))
                async with await asking as response:
                    assert response.status == status
                    expected = {400: None, 429: "70", 503: "1"}
                    assert response.headers.get("Retry-After") == expected[status]
                    error = (await response.json())["error"]
                    code = "context_length_exceeded" if is_too_long else "server_refused"
                    assert (error["message"], error["code"]) == ("no \N{SNOWMAN}", code)

    run(test)


def test_chats_are_rendered_one_at_a_time_beside_the_event_loop() -> None:
    """The event loop does not wait for the process that renders them."""
    busy = threading.Semaphore(1)
    threads: set[str] = set()

    class Slow(ByteTokenizer):
        def render(self, messages: Any, tools: Any = None) -> str:
            threads.add(threading.current_thread().name)
            assert busy.acquire(blocking=False), "two at a time"
            time.sleep(0.02)
            busy.release()
            return "a"

    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}

    async def test() -> None:
        served = ServedModel(("dummy",), Slow(), PromptLimits(vocab_size=256, max_seq_len=200))
        async with api(served=served) as a:
            answers = [a.answer("/v1/chat/completions", **body) for _ in range(5)]
            assert [answer["usage"]["prompt_tokens"] for answer in await asyncio.gather(*answers)] == [1] * 5
        assert threads == {"mpillm-render_0"}

    run(test)
