"""The routes: convert an HTTP request to prompts, and answers to a response. Runs in the HTTP thread."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from mpillm.comms.messages import RequestFlag
from mpillm.endpoint.admission import Guard, Handler
from mpillm.endpoint.api_error import ApiError, Json
from mpillm.endpoint.body_values import LARGE
from mpillm.endpoint.choices import Choice, Piece
from mpillm.endpoint.connections import address_of
from mpillm.endpoint.http_errors import on_expect
from mpillm.endpoint.open_requests import OpenRequests, PendingResponse
from mpillm.endpoint.perf_metrics import PerfMetrics
from mpillm.endpoint.prometheus import TEXT, ServeMetrics
from mpillm.endpoint.protocol import REQUEST_ID, CompletionRequest, ServedModel, encode, read, render
from mpillm.endpoint.shapes import DONE, Shapes, error_event
from mpillm.version import __version__

if TYPE_CHECKING:  # few servers have these routes
    from mpillm.endpoint.disagg.instances import Arrival
    from mpillm.endpoint.disagg.routes import DisaggRoutes

_log = logging.getLogger(__name__)
# Characters. Longer texts are tokenized in another thread, so that streams continue.
_LONG_TEXT = 20_000
_MAX_BYTES = 1 << 31  # for all open requests, by `OpenRequests.bytes_of`
# Beyond its limit, the queue has an eighth more places, for clients with at most as many open requests.
_SPARE_PART = 8

_request_id: ContextVar[str] = ContextVar("request_id")  # of the request of this task
_came_at: ContextVar[float] = ContextVar("came_at")  # its arrival, time.perf_counter()


def _id_of(request: web.Request, other: str = "") -> str:
    """Return the id in a request's header; without one, `other` or a new id."""
    in_header = request.headers.get("X-Request-Id", "")
    return in_header if REQUEST_ID.fullmatch(in_header) else other or uuid.uuid4().hex


class Service:
    """The routes and their shared state."""

    def __init__(
        self,
        served: ServedModel,
        requests: OpenRequests,
        *,
        guard: Guard | None = None,
        max_queue_size: int = 1024,
        perf_metrics_max_requests: int = 0,
        kv_cache_usage: Callable[[], float | None] = lambda: None,
        counts_cached: bool = False,
        tokens_per_block: int = 32,
        lost: Sequence[Mapping[str, Any]] = (),
        disagg: DisaggRoutes | None = None,
        reset_prefix_cache: Callable[[], None] | None = None,
    ) -> None:
        """`max_queue_size`: limit of requests without a first token; beyond it, clients get 429.

        `kv_cache_usage`: returns the usage of the fullest instance; None: unknown. `counts_cached`: the
        instances report the cached tokens of all prompts, so `/metrics` has them. `tokens_per_block`: of the
        KV cache, for `/perf_metrics`. `lost`: lost instances, as in `result.json`; it may grow.
        `reset_prefix_cache`: for the route of this name; None: there is no such route.
        """
        self.metrics = ServeMetrics(counts_cached)
        self.guard = guard or Guard()
        self.perf_metrics = PerfMetrics(self.guard, perf_metrics_max_requests, tokens_per_block)
        self._served = served
        self._requests = requests
        self._max_queue_size = max_queue_size
        self._kv_cache_usage = kv_cache_usage
        self._row_flags = RequestFlag(0)
        if self.perf_metrics.enabled:
            self._row_flags |= RequestFlag.TIMES | RequestFlag.PROMPT_COUNTS
        if counts_cached or not served.is_disagg:
            self._row_flags |= RequestFlag.PROMPT_COUNTS
        self._lost = lost
        self._disagg = disagg
        self._reset_prefix_cache = reset_prefix_cache
        self._started = int(time.time())
        self._n_open: Counter[str] = Counter()  # open answers, by client address
        self._parser = ThreadPoolExecutor(1, "mpillm-parse")
        self._renderer = ThreadPoolExecutor(1, "mpillm-render")

    def app(self) -> web.Application:
        app = web.Application(client_max_size=self.guard.max_body_bytes, middlewares=[self._around])
        app.add_routes(
            [
                web.post("/v1/completions", self._completions, expect_handler=on_expect),
                web.post("/v1/chat/completions", self._chat, expect_handler=on_expect),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{model:.+}", self._model),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/version", self._version),
                *self.perf_metrics.routes(),
            ]
        )
        if self._reset_prefix_cache is not None:
            app.router.add_post("/reset_prefix_cache", self._reset_cache)
        if self._disagg is not None:
            app.router.add_get("/server_info", self._disagg.server_info)
        return app

    # --- around every route ---

    @web.middleware
    async def _around(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Set the request's id, and count the response."""
        request_id = _id_of(request)
        _request_id.set(request_id)
        _came_at.set(time.perf_counter())
        response = await self.guard.answered(handler, request, f"request {request_id}")
        self.metrics.responded(response.status)
        if not response.prepared:
            response.headers["X-Request-Id"] = _request_id.get()
        return response

    # --- state ---

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [self._card(name) for name in self._served.names]}
        )

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if name not in self._served.names:
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this server has {self._served.names[0]}",
                "model",
                "model_not_found",
            )
        return web.json_response(self._card(name))

    def _card(self, name: str) -> Json:
        card: Json = {"id": name, "object": "model", "created": self._started, "owned_by": "mpillm"}
        card |= {"root": self._served.names[0], "parent": None, "max_model_len": self._served.max_model_len}
        longest = self._served.limits.max_prompt_len
        return card if longest is None else card | {"max_prompt_len": longest}

    async def _health(self, request: web.Request) -> web.Response:
        self.guard.check_open()
        if self._lost:  # the other instances still serve
            lost = [{key: one[key] for key in ("instance", "role", "cause", "at_s")} for one in self._lost]
            return web.json_response({"status": "degraded", "lost": lost})
        return web.Response()

    async def _reset_cache(self, request: web.Request) -> web.Response:
        """Empty the prefix caches: requests after the answer find no earlier prompts. As vLLM's route."""
        self.guard.check_open()
        assert self._reset_prefix_cache is not None
        self._reset_prefix_cache()
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": __version__})

    async def _metrics(self, request: web.Request) -> web.Response:
        gauges: dict[str, float] = {
            "num_requests_running": self._requests.running,
            "num_requests_waiting": self._requests.waiting,
            "instances_lost": len(self._lost),
            "requests_retried": sum(loss.retried for loss in self._requests.losses.values()),
        }
        if (usage := self._kv_cache_usage()) is not None:
            gauges["kv_cache_usage_perc"] = usage
        disagg = self._disagg if self._disagg is not None and not self._disagg.is_context else None
        text = self.metrics.text(self._served.names[0], gauges, disagg)
        return web.Response(text=text, headers={"Content-Type": TEXT})

    # --- answers ---

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=True)

    async def _answer(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        self.guard.check_open()
        loop = asyncio.get_running_loop()
        async with self.guard.body(request) as data:
            parts = data, chat, self._served, request.headers
            if len(data) > LARGE:  # in one thread, so that other threads run between bodies
                completion = await loop.run_in_executor(self._parser, read, *parts)
            else:
                completion = read(*parts)
            _request_id.set(_id_of(request, completion.request_id or _request_id.get()))
            disagg = self._disagg if completion.disaggregated else None
            if disagg is not None:
                completion = disagg.check(completion, self._served)
            if chat:  # `render` waits for another process
                completion = await loop.run_in_executor(self._renderer, render, completion, self._served)
            if completion.n_characters > _LONG_TEXT:
                prompts = await loop.run_in_executor(None, encode, completion, self._served)
            else:
                prompts = encode(completion, self._served)
        self.guard.check_open()
        client, n = address_of(request), completion.n * len(prompts)
        self._check_queue(client, n)
        self._check_memory(completion, prompts)
        self._n_open[client] += n
        try:
            return await self._generate(request, completion, prompts, disagg)
        finally:
            self._n_open[client] -= n
            if not self._n_open[client]:
                del self._n_open[client]

    async def _generate(
        self,
        request: web.Request,
        completion: CompletionRequest,
        prompts: Sequence[tuple[NDArray[np.int32], int]],
        disagg: DisaggRoutes | None,
    ) -> web.StreamResponse:
        each = [one for one in prompts for _ in range(completion.n)]
        shapes = Shapes(completion, _request_id.get(), self._served.names[0])
        if disagg is not None and disagg.is_context:
            return web.json_response(await self._context(disagg, completion, shapes, *prompts[0]))
        arrival = None if disagg is None else await disagg.fetch(completion, prompts[0][0], self._served)
        choices = [
            self._open(i, prompt, max_tokens, completion, arrival)
            for i, (prompt, max_tokens) in enumerate(each)
        ]
        try:
            if completion.stream:
                return await self._stream(request, completion, shapes, choices)
            parts = [""] * len(choices)

            async def read(choice: Choice) -> None:
                async with aclosing(self._pieces(choice)) as pieces:
                    parts[choice.index] = shapes.choice(choice, [piece async for piece in pieces])

            await _all([read(choice) for choice in choices])
            return web.Response(text=shapes.response(choices, parts), content_type="application/json")
        finally:
            for choice in choices:
                if disagg is not None and arrival is not None:
                    disagg.ended(choice.answer, arrival)
                self._requests.give_up(choice.answer)  # no effect if the answer has ended

    def _check_queue(self, client: str, n: int) -> None:
        """Raise ApiError if the queue has no space for `n` more answers to this address."""
        max_waiting = self._max_queue_size - n
        if (
            len(self._requests) <= max_waiting or (waiting := self._requests.waiting) <= max_waiting
        ):  # the property `waiting` counts one by one, so it comes last
            return
        spare = self._max_queue_size // _SPARE_PART
        if waiting <= max_waiting + spare and self._n_open[client] + n <= spare:
            return
        raise ApiError(
            429,
            f"{self._max_queue_size} requests are waiting already (--max_queue_size); try again later",
            code="queue_full",
        )

    def _check_memory(
        self, completion: CompletionRequest, prompts: Sequence[tuple[NDArray[np.int32], int]]
    ) -> None:
        """Raise ApiError if the prompts and the longest answers would need too much memory."""
        n_bytes = completion.n * sum(
            self._requests.bytes_of(len(prompt), max_tokens) for prompt, max_tokens in prompts
        )
        if n_bytes > _MAX_BYTES:
            total = completion.n * sum(len(prompt) + max_tokens for prompt, max_tokens in prompts)
            raise ApiError(
                400, f"prompts and answers may reach {total} tokens, which is too many for one request"
            )
        if self._requests.n_bytes + n_bytes > _MAX_BYTES:
            raise ApiError(429, "the open requests may need too much memory", code="queue_full")

    def _open(
        self,
        index: int,
        prompt: NDArray[np.int32],
        max_tokens: int,
        completion: CompletionRequest,
        arrival: Arrival | None = None,
        min_engine_tokens: int = 1,
    ) -> Choice:
        """Open a choice. `arrival`: a context server's result.

        `min_engine_tokens`: the engine's limit of output tokens is at least this.
        """
        row = completion.row | {
            "max_output": max(max_tokens, min_engine_tokens),
            "min_output": min(completion.min_tokens, max_tokens),
        }
        row["seed"] = (
            int(row["seed"]) + index % completion.n
        ) & 0xFFFFFFFF  # otherwise, sampled answers would be the same
        row["flags"] = int(row["flags"]) | self._row_flags
        if arrival is not None and max_tokens == 1:
            answer = PendingResponse.of(len(prompt), [arrival.first_token])
        else:
            answer = self._requests.open(row, prompt)
            if arrival is not None and self._disagg is not None:
                self._disagg.opened(answer, arrival)
        return Choice(index, answer, prompt, max_tokens, completion, self._served)

    async def _context(
        self,
        disagg: DisaggRoutes,
        completion: CompletionRequest,
        shapes: Shapes,
        prompt: NDArray[np.int32],
        max_tokens: int,
    ) -> Json:
        """Return the answer to a context-only request.

        After that, the request's KV cache is kept for a generation server.
        """
        await disagg.wait_for_capacity()
        choice = self._open(0, prompt, max_tokens, completion, min_engine_tokens=2)
        disagg.began(choice.answer)
        reason, keeps_cache = "abort", False
        try:
            while (piece := choice.take()) is None:
                await choice.answer.changed()
            self._check_answered(choice.answer)
            self.metrics.first_token(choice.answer)
            response = disagg.first(shapes, choice, piece)
            reason, keeps_cache = piece.finish_reason or "length", piece.finish_reason is None
            return response
        except ApiError:
            reason = "error"
            raise
        finally:
            self._finished(choice, reason)
            if not keeps_cache:
                self._requests.give_up(choice.answer)

    @staticmethod
    def _check_answered(answer: PendingResponse) -> None:
        """Raise ApiError if the answer was refused, has failed or was cancelled."""
        if answer.refusal is not None:
            status, message, retry_after_s, is_too_long = answer.refusal
            code = "context_length_exceeded" if is_too_long else "server_refused"
            raise ApiError(status, message, code=code, retry_after_s=retry_after_s or 1)
        if answer.failed:
            raise ApiError(
                500, "the engine could not answer; its rank's log has the cause", code="not_answered"
            )
        if answer.cancelled:
            raise Guard.shutting_down()

    async def _pieces(self, choice: Choice) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of a choice as they arrive, and count them.

        Raises ApiError if the answer was refused, has failed or was cancelled.
        """
        answer, reason = choice.answer, "abort"
        gaps = self.metrics.token_gaps(answer)
        try:
            while True:
                if (piece := choice.take()) is None:
                    await answer.changed()
                    continue
                self._check_answered(answer)
                if piece.tokens:
                    if choice.n_tokens == len(piece.tokens):
                        self.metrics.first_token(answer)
                    gaps.add(len(piece.tokens))
                reason = piece.finish_reason or reason
                yield piece
                if choice.n_tokens < len(
                    answer.tokens
                ):  # a long answer arrived in one piece: let other answers continue
                    await asyncio.sleep(0)
                if piece.finish_reason is not None:
                    return
        except ApiError:
            reason = "error"
            raise
        finally:
            self._finished(choice, reason)
            self._requests.give_up(answer)  # the engine does not know stop strings

    def _finished(self, choice: Choice, reason: str) -> None:
        """Count an answer that has ended for its client."""
        self.metrics.finished(choice.answer, reason, choice.n_tokens)
        if self.perf_metrics.enabled and reason in ("stop", "length"):
            ctx_request_id = None if self._disagg is None else self._disagg.ctx_request_id(choice)
            self.perf_metrics.add(_request_id.get(), _came_at.get(), choice.answer, ctx_request_id)

    async def _stream(
        self, request: web.Request, completion: CompletionRequest, shapes: Shapes, choices: list[Choice]
    ) -> web.StreamResponse:
        """Stream the response, which begins with the first piece. Raises ApiError if no piece comes."""
        response = _Stream(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # nginx must not buffer the stream
                "X-Request-Id": _request_id.get(),
            }
        )
        end: list[bytes] = []  # the last chunks, sent together in one packet
        is_one = len(choices) == 1

        async def write(choice: Choice) -> None:
            begin = shapes.role_chunk(choice) if completion.chat else b""
            async with aclosing(self._pieces(choice)) as pieces:
                async for piece in pieces:
                    if not response.prepared:
                        await response.prepare(request)
                    chunk, begin = begin + shapes.chunk(choice, piece), b""
                    if is_one and piece.finish_reason is not None:
                        end.append(chunk)
                    else:
                        await response.write(chunk)

        try:
            await _all([write(choice) for choice in choices])
            if completion.include_usage:
                end.append(shapes.usage_chunk(choices))
            end.append(DONE)
        except ApiError as error:
            if not response.prepared:
                raise
            end.append(error_event(error.body()))
        await response.write_eof(b"".join(end))
        return response


class _Stream(web.StreamResponse):
    """A response that sends its head together with the first data."""

    _send_headers_immediately = False


async def _all(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run `works` concurrently. If one fails or the caller is cancelled, cancel the others and await them."""
    if len(works) == 1:  # a task would only cost time
        return await works[0]
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
