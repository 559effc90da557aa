"""`/perf_metrics`: for each of the last requests, the times of its arrival, its start and its tokens.

Path and names follow `trtllm-serve` (`get_perf_metrics` in tensorrt_llm/serve/openai_server.py). Times are
seconds of this machine's steady clock. An instance reports how long before the first token it got and started
the request. Both are subtracted from the first token's arrival in this process, so clocks of other nodes do
not matter. The leader of disaggregated servers measures the offset of each server's clock from its own
(`/steady_clock_offset`), and the server adds the offset to its times.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from aiohttp import web

from mpillm.endpoint.admission import Guard
from mpillm.endpoint.api_error import Json
from mpillm.endpoint.open_requests import PendingResponse
from mpillm.endpoint.protocol import read_clock_offset

_TIMES, _CLOCK = "/perf_metrics", "/steady_clock_offset"


class _Request(NamedTuple):
    id: str
    came_at: float  # time.perf_counter(), before the prompt was tokenized
    answer: PendingResponse
    ctx_request_id: object  # the same in both servers; None: not a disaggregated request


class PerfMetrics:
    """The times of the last requests that ended without an error, until they are read."""

    def __init__(self, guard: Guard, max_requests: int, tokens_per_block: int) -> None:
        """`guard`: of the routes; `max_requests`: number of requests that are kept, 0: none.

        `tokens_per_block`: of the KV cache.
        """
        self._guard = guard
        self._tokens_per_block = tokens_per_block
        self._requests: deque[_Request] = deque(maxlen=max_requests)
        self._offset_s = 0.0

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get(_TIMES, self._get),
            web.get(_CLOCK, self._clock),
            web.post(_CLOCK, self._set_clock),
        ]

    async def _get(self, request: web.Request) -> web.Response:
        return web.json_response(self.take())

    async def _clock(self, request: web.Request) -> web.Response:
        """Return the clock's times from which a leader computes this clock's offset, as in NTP."""
        came_at = time.perf_counter()
        return web.json_response({"receive_ts": came_at, "transmit_ts": time.perf_counter()})

    async def _set_clock(self, request: web.Request) -> web.Response:
        async with self._guard.body(request) as data:
            self._offset_s = read_clock_offset(data)
        return web.Response()

    @property
    def enabled(self) -> bool:
        return self._requests.maxlen != 0

    def add(
        self, request_id: str, came_at: float, answer: PendingResponse, ctx_request_id: object = None
    ) -> None:
        """Add an answer that has ended."""
        self._requests.append(_Request(request_id, came_at, answer, ctx_request_id))

    def take(self) -> list[Json]:
        """Return and remove the complete requests, the oldest first."""
        ready = [request for request in self._requests if request.answer.released]
        left = [request for request in self._requests if not request.answer.released]
        self._requests.clear()
        self._requests.extend(left)
        return [_to_json(request, self._offset_s, self._tokens_per_block) for request in ready]


def _to_json(request: _Request, offset_s: float, tokens_per_block: int) -> Json:
    answer = request.answer
    timing: Json = {
        "server_arrival_time": request.came_at,
        "arrival_time": answer.opened_at,
        "first_scheduled_time": None,
        "first_token_time": answer.first_at,
        "server_first_token_time": answer.first_at,
        "last_token_time": answer.last_at,
    }
    metrics: Json = {}
    if answer.times is not None:
        at_instance_us, started_us = answer.times
        timing["arrival_time"] = answer.first_at - 1e-6 * at_instance_us
        timing["first_scheduled_time"] = answer.first_at - 1e-6 * started_us
    if answer.cached is not None:
        metrics["kv_cache_metrics"] = {"num_reused_blocks": answer.cached // tokens_per_block}
    if answer.moved is not None:
        end, us = answer.moved
        timing |= {"kv_cache_transfer_start": end - 1e-6 * us, "kv_cache_transfer_end": end}
    metrics["timing_metrics"] = {name: at and at + offset_s for name, at in timing.items()}
    result: Json = {"request_id": request.id, "perf_metrics": metrics}
    return result if request.ctx_request_id is None else result | {"ctx_request_id": request.ctx_request_id}
