"""One request from the leader to one of its servers."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Mapping

import aiohttp
import numpy as np
from numpy.typing import NDArray

from launch.bounded_http import MAX_ANSWER_BYTES, MAX_EVENT_BYTES
from mpillm.endpoint.api_error import ApiError, Json
from mpillm.endpoint.body_values import LARGE
from mpillm.endpoint.leader.workers import Assignment, Pool, Worker, reason

_log = logging.getLogger(__name__)
_CONNECT_S = 10.0
_MAX_TOKEN = 1 << 31  # servers reject larger token ids and larger numbers of tokens
_EVENT = b"\ndata:"
_MAX_OUTPUT = 1 << 20  # tokens, if the request has no limit
_MAX_PIECES = 64  # events for each token
_MORE_EVENTS = 16  # events without tokens: roles, reasons, usage


class ServerRequest:
    """A request to one server of a pool; inside its `with` block, also the response.

    Raises ApiError with the cause if the server does not respond.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        pool: Pool,
        silence_s: float,
        path: str,
        headers: Mapping[str, str],
        body: Json | None = None,
        max_retries: int | None = None,
        session_number: int = 0,
    ) -> None:
        """POST `body`, or GET without a body.

        Args:
            silence_s: Longest silence of the server. Also the time limit for the head of its response, for a
                complete body that is not a stream, and for each event of a stream.
            max_retries: How many other servers to try; None: all.
            session_number: The conversation, see `session_of`.
        """
        self._session = session
        self._pool = pool
        self._silence_s = silence_s
        self._path = path
        self._headers = headers
        self._session_number = session_number
        self._body = body
        self._max_servers = len(pool.workers) if max_retries is None else 1 + max_retries
        self._place: Assignment | None = None
        self._response: aiohttp.ClientResponse | None = None

    async def __aenter__(self) -> ServerRequest:
        tried: list[Worker] = []
        prompt, n_output = _load_of(self._body or {})
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=self._silence_s)
        while True:
            self._place = self._pool.take(prompt, n_output, tried, self._session_number)
            if self._place is None:
                raise self._no_server(tried)
            try:
                asking = self._session.request(
                    "GET" if self._body is None else "POST",
                    self.worker.base + self._path,
                    json=self._body,
                    headers=self._headers,
                    timeout=timeout,
                    allow_redirects=False,  # another address must not get prompts or the key
                )
                self._response = await asyncio.wait_for(asking, _CONNECT_S + self._silence_s)
                if 300 <= self.status < 400:
                    self._response.close()
                    raise self._bad(f"it redirects (HTTP {self.status})")
                return self
            except BaseException as error:
                self._pool.give_back(self._place)
                # nothing was sent: try another server
                if isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)):
                    self.worker.lose(reason(error))
                    tried.append(self.worker)
                    if len(tried) == self._max_servers:
                        raise self._no_server(tried) from None
                elif isinstance(error, (OSError, asyncio.TimeoutError, aiohttp.ClientError)):
                    raise self._lost(error) from None
                else:
                    raise

    async def __aexit__(self, *_: object) -> None:
        assert self._place is not None
        self._pool.give_back(self._place)
        if self._answer.content.at_eof():
            self._answer.release()
        else:
            self._answer.close()

    @property
    def worker(self) -> Worker:
        assert self._place is not None
        return self._place.worker

    @property
    def status(self) -> int:
        return self._answer.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._answer.headers

    @property
    def _answer(self) -> aiohttp.ClientResponse:
        assert self._response is not None
        return self._response

    async def read(self, max_bytes: int | None = None) -> bytes:
        """Return the body. Raises ApiError if it exceeds `max_bytes`, by default MAX_ANSWER_BYTES."""
        max_bytes = max_bytes or MAX_ANSWER_BYTES
        parts: list[bytes] = []

        async def read_all() -> None:
            left = max_bytes
            async for part in self._answer.content.iter_any():
                if (left := left - len(part)) < 0:
                    raise self._bad(f"its answer is longer than {max_bytes} bytes")
                parts.append(part)

        try:
            await asyncio.wait_for(read_all(), self._silence_s)
        except (OSError, asyncio.TimeoutError, aiohttp.ClientError) as error:
            raise self._lost(error) from None
        return b"".join(parts)

    async def json(self) -> Json:
        data = await self.read()
        try:
            value = json.loads(data) if len(data) <= LARGE else await asyncio.to_thread(json.loads, data)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise self._bad("its answer is not a JSON object")
        return value

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the body of a stream as it arrives."""
        body = self._body or {}
        n = body.get("n")
        _, n_output = _load_of(body)
        n_choices = n if type(n) is int and n > 0 else 1
        max_events = n_choices * ((n_output or _MAX_OUTPUT) * _MAX_PIECES + _MORE_EVENTS)
        events, waited, last_event = 0, 0, time.monotonic()
        tail = b"\n"  # end of the previous data; too short to contain a counted event
        try:
            async for chunk in self._answer.content.iter_any():
                new = (seen := tail + chunk).count(_EVENT)
                tail = seen[1 - len(_EVENT) :]
                waited = 0 if new else waited + len(chunk)
                last_event = time.monotonic() if new else last_event
                events += new
                if waited > MAX_EVENT_BYTES:
                    raise self._bad(f"it sent {waited} bytes without an event")
                if events > max_events:
                    raise self._bad(f"it sent more than {max_events} events")
                if time.monotonic() - last_event > self._silence_s:
                    raise self._lost(asyncio.TimeoutError())
                yield chunk
        except (OSError, asyncio.TimeoutError, aiohttp.ClientError) as error:
            raise self._lost(error) from None

    def _bad(self, problem: str) -> ApiError:
        return ApiError(502, f"{self.worker.name}: {problem}", code="bad_answer")

    def _lost(self, error: BaseException) -> ApiError:
        if isinstance(error, asyncio.TimeoutError):
            is_silent = isinstance(error, aiohttp.ServerTimeoutError)
            how = "was silent" if is_silent else "sent data, but no answer,"
            silence = f"it {how} for {self._silence_s:g} s (--stall_timeout)"
            return ApiError(504, f"{self.worker.name}: {silence}", code=f"{self._pool.kind}_server")
        message = f"{self.worker.name} was lost while it answered: {reason(error)}"
        _log.warning("%s", message)
        return ApiError(502, message, code=f"{self._pool.kind}_server")

    def _no_server(self, tried: list[Worker]) -> ApiError:
        causes = self._pool.failures() or "; ".join(f"{one.name}: {one.failure}" for one in tried)
        return ApiError(503, causes, code=f"no_{self._pool.kind}_server")


def _load_of(body: Json) -> tuple[NDArray[np.int32], int]:
    """Return a body's prompt, as tokens or as bytes of text, and its limit of answer tokens; 0: no limit."""
    prompt = body.get("prompt_token_ids") or body.get("prompt") or body.get("messages") or []
    n_output = body.get("max_completion_tokens") or body.get("max_tokens")
    n_output = n_output if type(n_output) is int and 0 < n_output < _MAX_TOKEN else 0
    if isinstance(prompt, list) and all(type(one) is int and 0 <= one < _MAX_TOKEN for one in prompt):
        return np.array(prompt, np.int32), n_output
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    return np.frombuffer(text.encode(errors="replace"), np.uint8).astype(np.int32), n_output
