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
from mpillm.endpoint.leader.workers import Place, Pool, Worker, reason

_log = logging.getLogger(__name__)
_CONNECT_S = 10.0
_MOST = 1 << 31  # the server refuses what is not a number of tokens, or a token
_EVENT = b"\ndata:"
_MOST_OUTPUT = 1 << 20  # tokens, where the request does not say how many it wants
_MOST_PIECES = 64  # events for a token
_MORE_EVENTS = 16  # besides those with tokens: roles, reasons, usage


class Ask:
    """A request to one server of a pool; as a context manager, its answer.

    Raises ApiError, which says why, if there is none.
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
    ) -> None:
        """POST `body`, or GET without one.

        `silence_s`: how long the server may say nothing; and how long it may take for the head of its answer,
        for a body that is no stream, and for an event of a stream.

        `max_retries`: how many other servers may be asked; None: all.
        """
        self._session = session
        self._pool = pool
        self._silence_s = silence_s
        self._path = path
        self._headers = headers
        self._body = body
        self._most = len(pool.workers) if max_retries is None else 1 + max_retries
        self._place: Place | None = None
        self._response: aiohttp.ClientResponse | None = None

    async def __aenter__(self) -> Ask:
        tried: list[Worker] = []
        prompt, n_output = _load_of(self._body or {})
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=self._silence_s)
        while True:
            self._place = self._pool.take(prompt, n_output, tried)
            if self._place is None:
                raise self._nobody(tried)
            try:
                asking = self._session.request(
                    "GET" if self._body is None else "POST",
                    self.worker.base + self._path,
                    json=self._body,
                    headers=self._headers,
                    timeout=timeout,
                    allow_redirects=False,  # prompts and the key go to no other address
                )
                self._response = await asyncio.wait_for(asking, _CONNECT_S + self._silence_s)
                if 300 <= self.status < 400:
                    self._response.close()
                    raise self._bad(f"it redirects (HTTP {self.status})")
                return self
            except BaseException as error:
                self._pool.give_back(self._place)
                # Nothing was sent: another server may have it
                if isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)):
                    self.worker.lose(reason(error))
                    tried.append(self.worker)
                    if len(tried) == self._most:
                        raise self._nobody(tried) from None
                elif isinstance(error, (OSError, asyncio.TimeoutError, aiohttp.ClientError)):
                    raise self._lost(error) from None
                else:
                    raise

    async def __aexit__(self, *_: object) -> None:
        assert self._place is not None
        self._pool.give_back(self._place)
        if self._there.content.at_eof():
            self._there.release()
        else:
            self._there.close()

    @property
    def worker(self) -> Worker:
        assert self._place is not None
        return self._place.worker

    @property
    def status(self) -> int:
        return self._there.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._there.headers

    @property
    def _there(self) -> aiohttp.ClientResponse:
        assert self._response is not None
        return self._response

    async def read(self, most: int | None = None) -> bytes:
        """Return the body. Raises ApiError if it has more than `most` bytes, or than an answer may have."""
        most = most or MAX_ANSWER_BYTES
        parts: list[bytes] = []

        async def read_all() -> None:
            left = most
            async for part in self._there.content.iter_any():
                if (left := left - len(part)) < 0:
                    raise self._bad(f"its answer is longer than {most} bytes")
                parts.append(part)

        try:
            await asyncio.wait_for(read_all(), self._silence_s)
        except (OSError, asyncio.TimeoutError, aiohttp.ClientError) as error:
            raise self._lost(error) from None
        return b"".join(parts)

    async def json(self) -> Json:
        data = await self.read()
        try:
            made = json.loads(data) if len(data) <= LARGE else await asyncio.to_thread(json.loads, data)
        except (ValueError, RecursionError):
            made = None
        if not isinstance(made, dict):
            raise self._bad("its answer is not a JSON object")
        return made

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the body of a stream as it arrives."""
        body = self._body or {}
        n = body.get("n")
        _, n_output = _load_of(body)
        n_choices = n if type(n) is int and n > 0 else 1
        most = n_choices * ((n_output or _MOST_OUTPUT) * _MOST_PIECES + _MORE_EVENTS)
        events, waited, heard_at = 0, 0, time.monotonic()
        tail = b"\n"  # of what came before; too short to be counted again
        try:
            async for chunk in self._there.content.iter_any():
                new = (seen := tail + chunk).count(_EVENT)
                tail = seen[1 - len(_EVENT) :]
                waited = 0 if new else waited + len(chunk)
                heard_at = time.monotonic() if new else heard_at
                events += new
                if waited > MAX_EVENT_BYTES:
                    raise self._bad(f"it sent {waited} bytes without an event")
                if events > most:
                    raise self._bad(f"it sent more than {most} events")
                if time.monotonic() - heard_at > self._silence_s:
                    raise self._lost(asyncio.TimeoutError())
                yield chunk
        except (OSError, asyncio.TimeoutError, aiohttp.ClientError) as error:
            raise self._lost(error) from None

    def _bad(self, what: str) -> ApiError:
        return ApiError(502, f"{self.worker.name}: {what}", code="bad_answer")

    def _lost(self, error: BaseException) -> ApiError:
        if isinstance(error, asyncio.TimeoutError):
            is_silent = isinstance(error, aiohttp.ServerTimeoutError)
            how = "said nothing" if is_silent else "did not answer, but said something,"
            silence = f"it {how} for {self._silence_s:g} s (--stall_timeout)"
            return ApiError(504, f"{self.worker.name}: {silence}", code=f"{self._pool.kind}_server")
        message = f"{self.worker.name} was lost while it answered: {reason(error)}"
        _log.warning("%s", message)
        return ApiError(502, message, code=f"{self._pool.kind}_server")

    def _nobody(self, tried: list[Worker]) -> ApiError:
        gone = self._pool.all_gone() or "; ".join(f"{one.name}: {one.gone}" for one in tried)
        return ApiError(503, gone, code=f"no_{self._pool.kind}_server")


def _load_of(body: Json) -> tuple[NDArray[np.int32], int]:
    """Return a body's prompt, as tokens or as bytes of text, and the number of tokens that its answer may
    have."""
    prompt = body.get("prompt_token_ids") or body.get("prompt") or body.get("messages") or []
    n_output = body.get("max_completion_tokens") or body.get("max_tokens")
    n_output = n_output if type(n_output) is int and 0 < n_output < _MOST else 0
    if isinstance(prompt, list) and all(type(one) is int and 0 <= one < _MOST for one in prompt):
        return np.array(prompt, np.int32), n_output
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    return np.frombuffer(text.encode(errors="replace"), np.uint8).astype(np.int32), n_output
