"""One request from the leader to one of its servers."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Mapping

import aiohttp
import numpy as np
from numpy.typing import NDArray

from mpillm.endpoint.api_error import ApiError, Json
from mpillm.endpoint.workers import Place, Pool, Worker, reason

_log = logging.getLogger(__name__)
_CONNECT_S = 10.0
_MOST = 1 << 31  # the server refuses what is not a number of tokens, or a token


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
        """POST `body`, or GET without one. `silence_s`: how long the server may say nothing.

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
                self._response = await self._session.request(
                    "GET" if self._body is None else "POST",
                    self.worker.base + self._path,
                    json=self._body,
                    headers=self._headers,
                    timeout=timeout,
                )
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

    async def read(self) -> bytes:
        try:
            return await self._there.read()
        except (OSError, asyncio.TimeoutError, aiohttp.ClientError) as error:
            raise self._lost(error) from None

    async def json(self) -> Json:
        try:
            made = json.loads(await self.read())
        except (ValueError, RecursionError):
            made = None
        if not isinstance(made, dict):
            raise ApiError(502, f"{self.worker.name}: its answer is not a JSON object", code="bad_answer")
        return made

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the body as it arrives."""
        try:
            async for chunk in self._there.content.iter_any():
                yield chunk
        except (OSError, asyncio.TimeoutError, aiohttp.ClientError) as error:
            raise self._lost(error) from None

    def _lost(self, error: BaseException) -> ApiError:
        if isinstance(error, asyncio.TimeoutError):
            silence = f"it said nothing for {self._silence_s:g} s (--stall_timeout)"
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
