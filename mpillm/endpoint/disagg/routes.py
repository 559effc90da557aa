"""Routes of a context or a generation server: TensorRT-LLM's `disaggregated_params`.

The leader (`endpoint.leader`, or `trtllm-serve disaggregated`) sends a request to a context
server with `request_type` context_only, and the result, with `request_type` generation_only, to a
generation server. Names and flow follow `tensorrt_llm/serve/openai_protocol.py`
(`DisaggregatedParams`) and `openai_disagg_service.py` in 1.3.0rc. `encoded_opaque_state` is private to each
engine (see `opaque_state`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from mpillm.comms.messages import RequestFlag
from mpillm.cores.capabilities import Cache
from mpillm.cores.openai_client.disagg_protocol import CONTEXT_ONLY, GENERATION_ONLY
from mpillm.endpoint.api_error import ApiError, Json
from mpillm.endpoint.body_values import token_ids
from mpillm.endpoint.choices import Choice, Piece
from mpillm.endpoint.disagg.instances import Arrival
from mpillm.endpoint.disagg.kv_socket import TOO_LATE, CacheLost, KvStore, fetch, plain_memory
from mpillm.endpoint.disagg.opaque_state import KvState, Seal, request_digest
from mpillm.endpoint.open_requests import PendingResponse
from mpillm.endpoint.protocol import CompletionRequest, ServedModel
from mpillm.endpoint.shapes import Shapes
from mpillm.files import excerpt

_log = logging.getLogger(__name__)
_FETCHES = 64  # simultaneous fetches
_LOOK_S = 0.02  # time between checks for free capacity


@dataclass(frozen=True)
class KvFormat:
    """The properties that both servers' KV caches must share."""

    layout: str  # model, layers, heads and data type, in words
    bytes_per_token: int


class DisaggRoutes:
    """The routes' part of disaggregated serving; used only in the HTTP thread."""

    def __init__(
        self,
        role: str,
        name: str,
        kv: KvFormat,
        host: str,
        store: KvStore | None,
        arrivals: dict[int, Arrival],
        timeout_s: float,
        seal: Seal,
    ) -> None:
        """`role`: context or generation; `name`: this server's name, with its URL.

        `host`: address at which generation servers reach `store`; only a context server has a store.
        `timeout_s`: time within which a KV cache must be fetched.
        """
        self.is_context = role == "context"
        self.transfers = self.failed_transfers = 0  # fetched KV caches, and failed fetches
        self._role = role
        self._name = name
        self._kv = kv
        self._host = host
        self._store = store
        self._arrivals = arrivals
        self._timeout_s = timeout_s
        self._seal = seal
        self._fetchers = ThreadPoolExecutor(_FETCHES, "mpillm-fetch") if store is None else None
        # A limit of fetches for each context server: a silent server cannot use all threads.
        self._shares: dict[tuple[str, int], asyncio.Semaphore] = {}
        self.new_cache: Callable[[int], Cache] = plain_memory
        """Returns memory for a fetched cache; from the core, once the core is loaded."""
        self._open: list[PendingResponse] = []  # context-only: their caches are not fetched or dropped yet
        self._turn = asyncio.Lock()  # requests that wait for capacity take turns

    def check(self, completion: CompletionRequest, served: ServedModel) -> CompletionRequest:
        """Return the request with the changes that its `disaggregated_params` require.

        Raises ApiError if this server does not support these parameters.
        """
        params = completion.disaggregated
        kind, own_kind = params.get("request_type"), CONTEXT_ONLY if self.is_context else GENERATION_ONLY
        if kind != own_kind:
            raise _wrong("request_type", f"{excerpt(kind)}: this is a {self._role} server: {own_kind}")
        flag = RequestFlag.CONTEXT_ONLY if self.is_context else RequestFlag.GENERATION_ONLY
        row = completion.row | {"flags": int(completion.row["flags"]) | int(flag)}
        prompts = completion.prompts
        if completion.prompt_token_ids is not None:  # a chat's, from the context server or a leader's router
            prompts = [token_ids(completion.prompt_token_ids, "prompt_token_ids", served.vocab_size)]
        if len(prompts) > 1 or completion.n > 1:
            raise ApiError(400, "with disaggregated_params there is one prompt, and n is 1", "prompt")
        if completion.logprobs is not None:
            raise ApiError(400, "logprobs is not supported with disaggregated_params", "logprobs")
        return dataclasses.replace(completion, row=row, prompts=prompts)

    def ctx_request_id(self, choice: Choice) -> object:
        """Return the id that the request has in both servers' `/perf_metrics`; None if no leader sent it."""
        params = choice.completion.disaggregated
        if not self.is_context:
            return params.get("ctx_request_id")
        return (params.get("disagg_request_id") or choice.answer.id) if params else None

    @staticmethod
    async def server_info(request: web.Request) -> web.Response:
        """Answer the first request of TensorRT-LLM's leader: there are no parameters to add to requests."""
        return web.json_response({"disaggregated_params": {}})

    # --- a context server ---

    async def wait_for_capacity(self) -> None:
        """Wait, in turn, until one more context-only request would leave credits for other requests.

        Raises ApiError if that takes too long.
        """
        if not (self._turn.locked() or self._is_full()):
            return
        end = time.monotonic() + self._timeout_s
        too_late = ApiError(429, "too many KV caches wait to be fetched; try again later", code="queue_full")
        try:
            await asyncio.wait_for(self._turn.acquire(), self._timeout_s)
        except asyncio.TimeoutError:
            raise too_late from None
        try:
            while self._is_full():
                if time.monotonic() > end:
                    raise too_late
                await asyncio.sleep(_LOOK_S)
        finally:
            self._turn.release()

    def _is_full(self) -> bool:
        assert self._store is not None
        if len(self._open) >= self._store.max_open:
            self._open = [answer for answer in self._open if not answer.released]
        return len(self._open) >= self._store.max_open

    def began(self, answer: PendingResponse) -> None:
        """Record a context-only request."""
        self._open.append(answer)

    def first(self, shapes: Shapes, choice: Choice, piece: Piece) -> Json:
        """Return the answer to a context-only request, which has its first token."""
        sent_params = choice.completion.disaggregated
        choice_json = json.loads(shapes.choice(choice, [piece]))
        response = shapes.around([choice]) | {
            "choices": [choice_json],
            "prompt_token_ids": choice.prompt.tolist(),
        }
        # TensorRT-LLM's leader requires these parameters even in a complete answer.
        params: Json = {
            "request_type": CONTEXT_ONLY,
            "first_gen_tokens": piece.tokens,
            "ctx_request_id": self.ctx_request_id(choice),
            "encoded_opaque_state": None,
            "draft_tokens": None,
            "disagg_request_id": sent_params.get("disagg_request_id"),
        }
        choice_json["disaggregated_params"] = params
        if piece.finish_reason is not None:  # the answer ends with its first token
            return response
        assert self._store is not None
        key = self._store.key(choice.answer.id)
        if key is None:
            raise ApiError(503, f"{self._name}: the KV cache was dropped before the answer", code="kv_cache")
        of = request_digest(choice.prompt, piece.tokens[0])
        state = KvState(self._name, self._host, self._store.port, key.hex(), self._kv.layout, of)
        choice_json["finish_reason"] = "not_finished" if choice.max_tokens > 1 else "length"
        params["encoded_opaque_state"] = self._seal.write(state)
        return response

    # --- a generation server ---

    async def fetch(
        self, completion: CompletionRequest, prompt: NDArray[np.int32], served: ServedModel
    ) -> Arrival:
        """Return the KV cache of a generation-only request.

        Raises ApiError, naming the context server, if the cache cannot be fetched.
        """
        end = time.monotonic() + self._timeout_s
        params = completion.disaggregated
        tokens = token_ids(params.get("first_gen_tokens"), "first_gen_tokens", served.vocab_size)
        if len(tokens) != 1:
            raise _wrong("first_gen_tokens", f"{len(tokens)} tokens; expected one")
        state = self._seal.read(params.get("encoded_opaque_state"))
        if state.kv != self._kv.layout:
            raise _wrong(
                "encoded_opaque_state",
                f"{state.server} has a KV cache of {state.kv}, {self._name} one of {self._kv.layout}",
            )
        if state.of != request_digest(prompt, tokens[0]):
            raise _wrong("encoded_opaque_state", "its KV cache is of another prompt or first token")
        n_bytes = len(prompt) * self._kv.bytes_per_token
        at, key = (state.host, state.port), bytes.fromhex(state.key)
        if at not in self._shares:
            self._shares[at] = asyncio.Semaphore(_FETCHES // 2)
        work = partial(fetch, *at, key, n_bytes, end, self.new_cache)
        try:
            cache = await self._in_thread(self._shares[at], work, end)
        except CacheLost as error:
            self.failed_transfers += 1
            _log.warning("%s, %s:%d: %s", state.server, state.host, state.port, error)
            raise ApiError(
                502,
                f"{state.server}: its KV cache cannot be fetched; our log has the cause",
                code="context_server",
            ) from None
        self.transfers += 1
        return Arrival(tokens[0], cache)

    async def _in_thread(self, share: asyncio.Semaphore, work: Callable[[], Cache], end: float) -> Cache:
        """Run `work` in a thread, which counts in `share` until it ends, even if the request is cancelled.

        Raises CacheLost if `share` has no place until `end`, time.monotonic().
        """
        assert self._fetchers is not None
        loop = asyncio.get_running_loop()
        try:
            await asyncio.wait_for(share.acquire(), end - time.monotonic())
        except asyncio.TimeoutError:
            raise CacheLost(TOO_LATE) from None
        future = self._fetchers.submit(work)

        def release(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(share.release)

        future.add_done_callback(release)
        return await asyncio.wrap_future(future)

    def opened(self, answer: PendingResponse, arrival: Arrival) -> None:
        """Record the fetched KV cache of a sent request."""
        self._arrivals[answer.id] = arrival

    def ended(self, answer: PendingResponse, arrival: Arrival) -> None:
        """Drop the fetched KV cache, if the instance has not received it."""
        # Another request may have this id by now.
        if self._arrivals.get(answer.id) is arrival:
            del self._arrivals[answer.id]


def _wrong(name: str, problem: str) -> ApiError:
    return ApiError(400, f"disaggregated_params.{name}: {problem}", f"disaggregated_params.{name}")
