"""The leader of disaggregated serving: one endpoint in front of context and generation servers.

Each request goes to a context server, and with its result to a generation server, as in TensorRT-LLM's
`openai_disagg_service.py` (context first). The servers may be mpillm's, or any that support
`disaggregated_params`. The client gets a server's error unchanged. If a server does not answer, the error
names it. If no connection to a server is made, the request goes to another one, at most `max_retries` times.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Sequence

import aiohttp
from aiohttp import web

from mpillm.cores.openai_client.disagg_protocol import DisaggregatedParams
from mpillm.endpoint.admission import Guard, Handler
from mpillm.endpoint.api_error import ApiError, Json
from mpillm.endpoint.body_values import LARGE, mapping, parse
from mpillm.endpoint.http_errors import on_expect
from mpillm.endpoint.leader.server_request import ServerRequest
from mpillm.endpoint.leader.workers import Pool, Worker
from mpillm.endpoint.prometheus import FIRST_TOKEN_S, REQUEST_S, TEXT, BucketHistogram, escaped, head
from mpillm.endpoint.protocol import stream_of
from mpillm.endpoint.sessions import SESSION_HEADERS, session_of
from mpillm.endpoint.shapes import DONE, error_event
from mpillm.version import __version__

_log = logging.getLogger(__name__)

_LABEL = 'server_role="leader"'
_SERVERS = (
    ("server_up", "Whether the server answers", "gauge"),
    ("server_requests_running", "Requests at the server", "gauge"),
    ("server_requests_total", "Requests placed at the server, refused ones too", "counter"),
)


class LeaderMetrics:
    """Counts since the start."""

    def __init__(self) -> None:
        self.running = 0  # requests without a complete answer
        self._responses: Counter[int] = Counter()  # by HTTP status
        self._first = BucketHistogram("Time to the first token of a stream", FIRST_TOKEN_S)
        self._latency = BucketHistogram("Time to the last token", REQUEST_S)

    def responded(self, status: int) -> None:
        self._responses[status] += 1

    def first_token(self, seconds: float) -> None:
        self._first.add(seconds)

    def answered(self, seconds: float) -> None:
        self._latency.add(seconds)

    def text(self, workers: Sequence[Worker]) -> str:
        """Return Prometheus' text format, version 0.0.4."""
        lines = [
            *head("num_requests_running", "Requests without a complete answer", "gauge"),
            f"mpillm:num_requests_running{{{_LABEL}}} {self.running}",
            *head("http_responses_total", "HTTP responses", "counter"),
        ]
        lines += [
            f'mpillm:http_responses_total{{{_LABEL},status="{status}"}} {n}'
            for status, n in sorted(self._responses.items())
        ]
        for name, histogram in (
            ("time_to_first_token_seconds", self._first),
            ("e2e_request_latency_seconds", self._latency),
        ):
            lines += [*head(name, histogram.help, "histogram"), *histogram.lines(f"mpillm:{name}", _LABEL)]
        values = [(not worker.failure, worker.running, worker.n_requests) for worker in workers]
        for i, (name, help_, kind) in enumerate(_SERVERS):
            lines += head(name, help_, kind)
            lines += [
                f'mpillm:{name}{{server="{escaped(worker.base)}",kind="{worker.kind}"}} {int(value[i])}'
                for worker, value in zip(workers, values, strict=True)
            ]
        return "\n".join(lines) + "\n"


_MAX_ERROR = 1 << 16  # bytes of a server's error to send to the client
_PASSED_ON = ("Authorization", "X-Request-Id", *SESSION_HEADERS)
_RESPONSE_HEADERS = ("Retry-After", "WWW-Authenticate", "X-Request-Id")


class LeaderService:
    """The leader's routes."""

    def __init__(
        self,
        contexts: Pool,
        generations: Pool,
        session: aiohttp.ClientSession,
        *,
        silence_s: float,
        guard: Guard | None = None,
        max_retries: int | None = None,
    ) -> None:
        """`silence_s`, `max_retries`: see `ServerRequest`."""
        self.guard = guard or Guard()
        self.metrics = LeaderMetrics()
        self.answered = self.failed = 0
        self._contexts = contexts
        self._generations = generations
        self._session = session
        self._silence_s = silence_s
        self._max_retries = max_retries
        self._protocol = DisaggregatedParams(1)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=self.guard.max_body_bytes, middlewares=[self._around])
        app.add_routes(
            [
                web.post("/v1/completions", self._answer, expect_handler=on_expect),
                web.post("/v1/chat/completions", self._answer, expect_handler=on_expect),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/version", self._version),
            ]
        )
        return app

    @web.middleware
    async def _around(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Count the response."""
        response = await self.guard.answered(handler, request, f"{request.method} {request.path}")
        self.failed += response.status >= 500
        self.metrics.responded(response.status)
        return response

    async def _health(self, request: web.Request) -> web.Response:
        self._check_open()
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        workers = [*self._contexts.workers, *self._generations.workers]
        return web.Response(text=self.metrics.text(workers), headers={"Content-Type": TEXT})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": __version__})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._check_open()
        async with self._request(self._generations, request) as answer:
            return web.Response(
                body=await answer.read(), status=answer.status, headers=_response_headers(answer)
            )

    def _check_open(self) -> None:
        self.guard.check_open()
        for pool in (self._contexts, self._generations):
            if causes := pool.failures():
                raise ApiError(503, causes, code=f"no_{pool.kind}_server")

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self._check_open()
        self.metrics.running += 1
        try:
            return await self._forward(request, time.perf_counter())
        finally:
            self.metrics.running -= 1

    async def _forward(self, request: web.Request, began: float) -> web.StreamResponse:
        async with self.guard.body(request) as data:
            body = _read(data) if len(data) <= LARGE else await asyncio.to_thread(_read, data)
        request_body = {name: value for name, value in body.items() if name != "stream_options"}
        for_context = self._protocol.for_context(request_body | {"stream": False})
        async with self._request(self._contexts, request, for_context) as answer:
            if answer.status != 200:
                return await self._passed_on(answer)
            first = await answer.json()
        try:
            params = self._protocol.handoff_params(first)
        except ValueError as error:
            raise ApiError(502, f"{answer.worker.name}: {error}", code="bad_answer") from None
        if params is None:
            first["choices"][0].pop(self._protocol.name, None)
            first.pop("prompt_token_ids", None)
            if body.get("stream"):
                self.metrics.first_token(time.perf_counter() - began)
            response = await _complete_response(request, first, body)
            self._done(began)
            return response
        tokens = "prompt_token_ids" if "messages" in body else "prompt"
        params["disagg_request_id"] = for_context[self._protocol.name]["disagg_request_id"]
        request_body = body | {tokens: first.get("prompt_token_ids")}
        for_generation = self._protocol.for_generation(request_body, params)
        async with self._request(self._generations, request, for_generation) as answer:
            if answer.status != 200:
                return await self._passed_on(answer)
            if not body.get("stream"):
                response = web.Response(body=await answer.read(), headers=_response_headers(answer))
                self._done(began)
                return response
            return await self._stream(request, answer, began)

    def _request(self, pool: Pool, request: web.Request, body: Json | None = None) -> ServerRequest:
        headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        path, retries = request.path, self._max_retries
        session = session_of(headers, body or {})
        return ServerRequest(self._session, pool, self._silence_s, path, headers, body, retries, session)

    async def _passed_on(self, answer: ServerRequest) -> web.Response:
        """Return a server's error unchanged."""
        data = await answer.read(_MAX_ERROR)
        return web.Response(body=data, status=answer.status, headers=_response_headers(answer))

    def _done(self, began: float) -> None:
        self.answered += 1
        self.metrics.answered(time.perf_counter() - began)

    async def _stream(self, request: web.Request, answer: ServerRequest, began: float) -> web.StreamResponse:
        response = web.StreamResponse(headers=_response_headers(answer))
        await response.prepare(request)
        try:
            first = True
            async for chunk in answer.chunks():
                if first:
                    self.metrics.first_token(time.perf_counter() - began)
                    first = False
                await response.write(chunk)
            self._done(began)
        except ApiError as error:
            self.failed += 1
            await response.write(b"\n\n" + error_event(error.body()))  # the stream may stop within a line
        await response.write_eof()
        return response


def _read(data: bytes) -> Json:
    """Check the parts of a body that the leader needs; the servers check the others."""
    body = parse(data)
    if body.get("disaggregated_params"):
        raise ApiError(400, "disaggregated_params: only the leader sets them", "disaggregated_params")
    stream_of(body)  # a context server cannot check the stream options, which it does not get
    return body


async def _complete_response(request: web.Request, answer: Json, body: Json) -> web.StreamResponse:
    """Return an answer that a context server has completed, as a stream if the client requested one."""
    if not body.get("stream"):
        return web.json_response(answer)
    (choice,) = answer["choices"]
    if (message := choice.pop("message", None)) is not None:
        choice["delta"] = message
        answer["object"] = "chat.completion.chunk"
    usage = answer.pop("usage", None)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    await response.write(b"data: %s\n\n" % json.dumps(answer).encode())
    if usage is not None and mapping(body, "stream_options").get("include_usage"):
        await response.write(b"data: %s\n\n" % json.dumps(answer | {"choices": [], "usage": usage}).encode())
    await response.write(DONE)
    await response.write_eof()
    return response


def _response_headers(answer: ServerRequest) -> dict[str, str]:
    names = ("Content-Type", "Cache-Control", *_RESPONSE_HEADERS)
    return {name: answer.headers[name] for name in names if name in answer.headers}
