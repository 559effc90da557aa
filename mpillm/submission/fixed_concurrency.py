"""Load at fixed concurrency, for MLPerf Endpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from mpillm.cores.openai_client.client import Client
from mpillm.cores.openai_client.dialect import Sampling
from mpillm.experiments.loadtest.load_test import LoadTest, Record
from mpillm.report.console import LoadProgress


class FixedConcurrency(LoadTest):
    """Load test with a fixed number of open requests, for a minimum time and number of requests."""

    def __init__(
        self,
        prompts: Sequence[NDArray[np.int32]],
        order: Iterator[int],
        sampling: Sampling,
        concurrency: int,
        min_requests: int,
        min_duration_s: float = 0.0,
    ) -> None:
        """`order`: endless indices of prompts."""
        super().__init__((), np.zeros(0), sampling, concurrency)
        self.indices: list[int] = []  # prompt of each record
        self._prompts = prompts
        self._order = order
        self._min_requests = min_requests
        self._min_duration_s = min_duration_s

    async def run(self, client: Client) -> float:
        """Send requests, wait for all answers, and return the duration in seconds."""
        self.client = client
        client.listener = self
        self._ended = asyncio.get_running_loop().create_future()
        self._started = time.perf_counter()
        self._send()
        await self._ended
        return time.perf_counter() - self._started

    def _so_far(self, elapsed_s: float) -> LoadProgress:
        planned = None if self._min_duration_s else self._min_requests
        lasts_s = self._min_duration_s or None
        return LoadProgress(self._ended_requests, self._issued, self._tokens, elapsed_s, planned, lasts_s)

    def _send(self) -> None:
        assert self.client is not None
        while len(self.client.calls) < self._max_concurrency and not self._over():
            index = next(self._order)
            prompt = self._prompts[index]
            self.indices.append(index)
            self.records.append(Record(len(prompt)))
            self._issued += 1
            self.client.submit(len(self.records) - 1, prompt.tolist(), self._sampling)
        if not self.client.calls:
            self._ended.set_result(None)

    def _over(self) -> bool:
        assert self._started is not None
        lasted = time.perf_counter() - self._started
        return self._issued >= self._min_requests and lasted >= self._min_duration_s

    def _end(self) -> None:
        self._ended_requests += 1
        asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        if not self._ended.done():
            self._send()
