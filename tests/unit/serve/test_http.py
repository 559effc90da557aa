"""The API over real sockets, before the roles of a run in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientResponse, ClientSession
from aiohttp.web import AppRunner, SockSite

from mpillm.data.dataset import Limits
from mpillm.data.tokenizer import ByteTokenizer
from mpillm.serve.app import Service
from mpillm.serve.http_thread import bind, url
from mpillm.serve.protocol import Served
from tests.helpers.served import World, whole

DEADLINE_S = 120.0
SERVED = Served(("dummy", "other"), ByteTokenizer(), Limits(vocab_size=256, max_seq_len=200))
HOUR_MS = 3_600_000.0


class Letters(ByteTokenizer):
    """Every token is a letter, so that the dummy core's answers are text."""

    def decode(self, tokens: Any, keep_special: bool = False) -> str:
        return "".join(chr(ord("a") + int(token) % 26) for token in tokens)


class Api:
    """A client, and what it talks to."""

    def __init__(self, world: World, service: Service, session: ClientSession, base: str) -> None:
        self.world, self.service, self.session, self.base = world, service, session, base

    async def post(self, path: str, body: Any, **headers: str) -> ClientResponse:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.session.post(self.base + path, data=data, headers=headers)

    async def answer(self, path: str, **body: Any) -> dict[str, Any]:
        async with await self.post(path, body) as response:
            made: dict[str, Any] = await response.json()
            assert response.status == 200, made
            return made

    async def events(self, path: str, **body: Any) -> list[Any]:
        """Return the chunks of a stream, without the mark of its end."""
        async with await self.post(path, {**body, "stream": True}) as response:
            assert response.status == 200 and response.content_type == "text/event-stream"
            lines = (await response.text()).split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    async def error(self, status: int, path: str, body: Any, **headers: str) -> dict[str, Any]:
        async with await self.post(path, body, **headers) as response:
            text = await response.text()
            assert response.status == status, text
            error: dict[str, Any] = json.loads(text)["error"]
            assert sorted(error) == ["code", "message", "param", "type"] and error["message"]
            return error

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.002)

    async def idle(self) -> None:
        """Until no rank holds anything of any request."""
        await self.until(lambda: len(self.world.open) == 0 and not self.service.active)
        self.world.settle()
        self.world.check_idle()


@asynccontextmanager
async def api(
    disaggregated: bool = False, served: Served = SERVED, core: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[Api]:
    world = World(7, disaggregated, **core or {})
    service = Service(served, world.open, **options)
    runner = AppRunner(service.app(), handler_cancellation=True)
    await runner.setup()
    bound = bind("127.0.0.1", 0)
    await SockSite(runner, bound).start()

    async def turn() -> None:
        while True:
            for _ in range(30):
                world.turn()
            await asyncio.sleep(0)

    turning = asyncio.ensure_future(turn())
    try:
        async with ClientSession() as session:
            yield Api(world, service, session, url(bound).removesuffix("/v1"))
    finally:
        turning.cancel()
        await asyncio.gather(turning, return_exceptions=True)
        await runner.cleanup()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), DEADLINE_S))


BOTH = pytest.mark.parametrize("disaggregated", [False, True])
ROUTES = pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])


def asked(path: str, text: str = "hello") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}


@BOTH
def test_a_completion(disaggregated: bool) -> None:
    async def test() -> None:
        async with api(disaggregated, Served(("dummy",), Letters(), Limits(32000, 200))) as a:
            tokens = whole([1, 2, 3], 7)
            made = await a.answer(
                "/v1/completions", model="dummy", prompt=[1, 2, 3], max_tokens=7, return_token_ids=True
            )
            (choice,) = made["choices"]
            assert choice["token_ids"] == tokens and choice["prompt_token_ids"] == [1, 2, 3]
            assert made["usage"] == {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10}
            assert (made["object"], made["model"], choice["finish_reason"]) == (
                "text_completion",
                "dummy",
                "length",
            )
            events = await a.events(
                "/v1/completions",
                prompt=[1, 2, 3],
                max_tokens=7,
                return_token_ids=True,
                stream_options={"include_usage": True},
            )
            *chunks, last = events
            assert last["choices"] == [] and last["usage"] == made["usage"]
            assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == tokens
            assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (
                len(chunks) - 1
            ) + ["length"]
            assert {chunk["id"] for chunk in events} == {last["id"]} != {made["id"]}
            await a.idle()

    run(test)


@BOTH
def test_a_chat(disaggregated: bool) -> None:
    async def test() -> None:
        async with api(
            disaggregated, Served(("dummy",), ByteTokenizer(), Limits(256, 400), max_output_len=9)
        ) as a:
            parts = [{"type": "text", "text": "hé"}, {"type": "text", "text": "llo"}]
            messages = [{"role": "system", "content": "short"}, {"role": "user", "content": parts}]
            made = await a.answer("/v1/chat/completions", messages=messages, return_token_ids=True)
            assert bytes(made["prompt_token_ids"]).decode() == "short\nhéllo"
            assert made["usage"]["completion_tokens"] == 9, "--max_output_len"
            assert made["choices"][0]["message"]["role"] == "assistant"
            first, *chunks = await a.events(
                "/v1/chat/completions", messages=messages, max_completion_tokens=4
            )
            assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            assert first["object"] == "chat.completion.chunk"
            assert chunks[-1]["choices"][0]["finish_reason"] == "length"
            await a.idle()

    run(test)


@BOTH
def test_several_prompts_of_one_body(disaggregated: bool) -> None:
    async def test() -> None:
        async with api(disaggregated, Served(("dummy",), Letters(), Limits(32000, 200))) as a:
            prompts = [[5], [6, 7], [8, 9, 10]]
            made = await a.answer("/v1/completions", prompt=prompts, max_tokens=3, return_token_ids=True)
            assert [choice["token_ids"] for choice in made["choices"]] == [
                whole(prompt, 3) for prompt in prompts
            ]
            got: dict[int, list[int]] = {0: [], 1: [], 2: []}
            for chunk in await a.events(
                "/v1/completions", prompt=prompts, max_tokens=3, return_token_ids=True
            ):
                for choice in chunk["choices"]:
                    got[choice["index"]] += choice["token_ids"]
            assert got == {i: whole(prompt, 3) for i, prompt in enumerate(prompts)}
            await a.idle()

    run(test)


@BOTH
def test_several_answers_to_each_prompt(disaggregated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of their own, with seeds of their own; a prompt's tokens count once."""

    async def test() -> None:
        async with api(disaggregated) as a:
            rows: list[Any] = []
            plain = a.world.open.open

            def note(row: Any, prompt: list[int]) -> Any:
                rows.append((row["seed"], prompt))
                return plain(row, prompt)

            monkeypatch.setattr(a.world.open, "open", note)
            body: dict[str, Any] = {"max_tokens": 3, "n": 2, "seed": 2**32 - 1, "return_token_ids": True}
            made = await a.answer("/v1/completions", prompt=[[5, 6], [7]], **body)
            assert rows == [(2**32 - 1, [5, 6]), (0, [5, 6]), (2**32 - 1, [7]), (0, [7])]
            told = [(choice["index"], choice["token_ids"]) for choice in made["choices"]]
            assert told == [(i, whole(prompt, 3)) for i, (_, prompt) in enumerate(rows)]
            assert made["usage"] == {"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15}
            chat = {
                "messages": [{"role": "user", "content": "hi"}],
                "stream_options": {"include_usage": True},
            }
            *chunks, last = await a.events("/v1/chat/completions", **body, **chat)
            n_prompt = len(rows[-1][1])
            assert last["usage"] == {
                "prompt_tokens": n_prompt,
                "completion_tokens": 6,
                "total_tokens": n_prompt + 6,
            }
            ends = [one["index"] for chunk in chunks for one in chunk["choices"] if one["finish_reason"]]
            assert sorted(ends) == [0, 1]
            error = await a.error(400, "/v1/completions", {"prompt": [[1]] * 2000, "n": 2})
            assert error["param"] == "n" and "4000 answers; a request may have 2048" in error["message"]
            await a.idle()

    run(test)


@BOTH
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_request_where_it_is_generated(disaggregated: bool, stream: bool) -> None:
    """The core would go on for an hour."""

    async def test() -> None:
        # Tokens from 26 on are a, b, c, …: "de" comes with the fifth.
        async with api(
            disaggregated, Served(("dummy",), Letters(), Limits(32000, 32000)), {"tpot_ms": 0.5}
        ) as a:
            body = {"prompt": [26], "max_tokens": 20_000, "stop": ["zz", "de"]}
            if stream:
                chunks = await a.events("/v1/completions", **body)
                text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
                last = chunks[-1]["choices"][0]
            else:
                made = await a.answer("/v1/completions", **body)
                (last,), text = made["choices"], made["choices"][0]["text"]
                assert made["usage"]["completion_tokens"] == 5
            assert (text, last["finish_reason"], last["stop_reason"]) == ("abc", "stop", "de")
            late = await a.answer("/v1/completions", **body | {"min_tokens": 6})
            assert late["choices"][0]["text"] == "abcdefghijklmnopqrstuvwxyzabc", (
                "the one in the first six does not count"
            )
            token = await a.answer("/v1/completions", prompt=[26], max_tokens=20_000, stop_token_ids=[28])
            assert (token["choices"][0]["text"], token["choices"][0]["stop_reason"]) == ("ab", 28)
            await a.idle()

    run(test)


@BOTH
@ROUTES
@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_disconnect_cancel_their_requests(disaggregated: bool, path: str, stream: bool) -> None:
    """More than the instances hold, so that some wait at the leader; none would end by itself."""

    async def test() -> None:
        async with api(disaggregated, core={"ttft_ms": 0.5, "tpot_ms": HOUR_MS}) as a:

            async def ask(i: int) -> None:
                async with await a.post(
                    path, {**asked(path, str(i)), "max_tokens": 9, "stream": stream}
                ) as response:
                    await response.read()

            tasks = [asyncio.ensure_future(ask(i)) for i in range(40)]
            await a.until(lambda: len(a.world.open) == 40 and a.world.open.running > 0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await a.idle()
            assert a.service.metrics.aborted == 40

    run(test)


@BOTH
def test_clients_that_disconnect_in_the_middle_of_a_stream(
    disaggregated: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no error of the server."""

    async def test() -> None:
        async with api(disaggregated, core={"tpot_ms": 1.0}, max_queue_size=2000) as a:
            gate = asyncio.Semaphore(50)

            async def ask(i: int) -> None:
                async with (
                    gate,
                    await a.post(
                        "/v1/completions", {"prompt": [i % 256], "max_tokens": 150, "stream": True}
                    ) as response,
                ):
                    assert response.status == 200
                    await response.content.readany()
                    response.close()

            await asyncio.gather(*(ask(i) for i in range(200)))
            await a.idle()
            assert (
                a.service.metrics.aborted + a.service.metrics.totals.samples == 200
                and a.service.metrics.aborted > 0
            )
        assert not caplog.records

    run(test)


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("n", {"n": 0}),
    ("n", {"n": 129}),
    ("n", {"n": True}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ("logprobs", {"logprobs": 0}),
    ("logprobs", {"logprobs": True}),
    ("echo", {"echo": True}),
    ("suffix", {"suffix": "x"}),
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
    [1.0],
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
def test_what_is_wrong_is_said(path: str) -> None:
    """With status 400, the parameter's name, and nothing left behind."""

    async def test() -> None:
        async with api() as a:
            for param, more in WRONG:
                error = await a.error(400, path, asked(path) | more)
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
            too_long = await a.error(400, path, asked(path, "x" * 150) | {"max_tokens": 51})
            assert too_long["code"] == "context_length_exceeded" and "200 tokens" in too_long["message"]
            assert (await a.error(404, path, asked(path) | {"model": "gpt"}))["code"] == "model_not_found"
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
                **asked(path),
                **harmless,
                temperature=1e-30,
                top_p=1e-30,
                seed=-1,
                stop=None,
                max_tokens=2,
            )
            await a.idle()

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
            async with a.session.get(a.base + "/health") as response:
                assert response.status == 200

    run(test)


def test_limits_of_bodies_and_of_the_queue() -> None:
    async def test() -> None:
        async with api(core={"ttft_ms": HOUR_MS}, max_body_bytes=1000, max_queue_size=3) as a:
            assert "1000 bytes" in (await a.error(413, "/v1/completions", b"x" * 1001))["message"]
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


def test_the_core_that_refuses_and_the_server_that_ends() -> None:
    """Before and in the middle of a stream."""

    async def test() -> None:
        async with api(core={"ttft_ms": 0.5, "tpot_ms": HOUR_MS}) as a:
            body = {"prompt": "x", "max_tokens": 5, "stream": True}
            async with await a.post("/v1/completions", body) as response:
                await response.content.readuntil(b"\n\n")
                a.service.draining = True
                assert (await a.error(503, "/v1/completions", body))["code"] == "shutting_down"
                async with a.session.get(a.base + "/health") as health:
                    assert health.status == 503
                a.world.open.give_up_all()
                last = (await response.text()).strip()
                assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
            await a.idle()

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
def test_times_of_requests_are_told_once_and_of_the_last_ones_only(disaggregated: bool) -> None:
    """The dummy core says nothing of its own: tests/e2e/test_serve.py has one that does."""

    async def test() -> None:
        async with api(disaggregated, perf_metrics_max_requests=3) as a:
            for i in range(5):
                body = {"prompt": [1, 2, 3], "max_tokens": 4}
                async with await a.post("/v1/completions", body, **{"X-Request-Id": f"r{i}"}) as response:
                    assert response.status == 200
            await a.idle()
            async with a.session.get(f"{a.base}/perf_metrics") as response:
                told = await response.json()
            assert [one["request_id"] for one in told] == ["r2", "r3", "r4"]
            for one in told:
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
            told = one["perf_metrics"]["timing_metrics"]
            assert told["server_arrival_time"] > clock["transmit_ts"] + 3600 > times["last_token_time"]
            assert told["first_scheduled_time"] is None
        async with api(disaggregated) as a:
            await a.answer("/v1/completions", prompt="hello", max_tokens=4)
            async with a.session.get(f"{a.base}/perf_metrics") as response:
                assert await response.json() == []

    run(test)
