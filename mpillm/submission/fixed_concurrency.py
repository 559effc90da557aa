"""Load at fixed concurrency, for MLPerf Endpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mpillm.cores.openai_client.call import Call
from mpillm.cores.openai_client.client import Client
from mpillm.cores.openai_client.dialect import Sampling
from mpillm.cores.openai_client.endpoint import EndpointError
from mpillm.experiments.loadtest.load_test import LoadTest, Record
from mpillm.report.console import LoadProgress
from mpillm.submission.salts import Salts
from mpillm.submission.steady_state import SuperPasses, find_steady_state

_GROWTH = 1.05  # of the elapsed time between two searches for the steady state, which take time of the client


class Goal(Protocol):
    """Length of a test."""

    min_s: float

    def is_reached(self, issued: int, elapsed_s: float) -> bool:
        """Return whether a test may end."""

    def add(self, request: int, record: Record) -> None:
        """Add the record of an ended request, numbered in the order of issue."""


class FullPasses:
    """Goal of whole passes over the data set for a minimum time."""

    def __init__(self, size: int, min_s: float) -> None:
        """`size`: samples of the data set."""
        self.size, self.min_s = size, min_s

    def is_reached(self, issued: int, elapsed_s: float) -> bool:
        return issued > 0 and issued % self.size == 0 and elapsed_s >= self.min_s

    def add(self, request: int, record: Record) -> None:
        """Do nothing: the times of requests do not matter."""


class SteadyStateGoal:
    """Goal of whole passes over the data set until there is a steady state, or for a maximum time."""

    def __init__(self, size: int, min_s: float, max_s: float) -> None:
        """`size`: samples of the data set. `min_s`: issue time of the steady state."""
        self.passes = SuperPasses(size)
        self.min_s, self.max_s = min_s, max_s
        self._next_search_s = min_s

    def is_reached(self, issued: int, elapsed_s: float) -> bool:
        """Return whether a test may end. Passes with outstanding requests do not count yet."""
        if issued == 0 or issued % self.passes.size:
            return False
        if elapsed_s >= self.max_s:
            return True
        if elapsed_s < self._next_search_s:
            return False
        self._next_search_s = _GROWTH * elapsed_s
        return find_steady_state(self.passes.complete(), self.passes.size, self.min_s).is_official

    def add(self, request: int, record: Record) -> None:
        if record.error:
            self.passes.of(request).add_failure(record.start)
        else:
            self.passes.of(request).add(record.start, record.ttft, record.tpot, record.output_len)


class FixedConcurrency(LoadTest):
    """Load test with a fixed number of open requests, for a number of requests or until a goal is reached."""

    def __init__(
        self,
        prompts: Sequence[NDArray[np.int32]],
        order: Iterator[int],
        sampling: Sampling,
        concurrency: int,
        n_requests: int = 0,
        goal: Goal | None = None,
        drained_after: int = 0,
        salts: Salts | None = None,
    ) -> None:
        """Create a test.

        Args:
            order: Indices of prompts, for all requests.
            n_requests: Requests of a test without a goal.
            drained_after: Requests after which the next ones wait until all have ended; 0: never.
            salts: Added to the prompts as they are sent.
        """
        super().__init__((), np.zeros(0), sampling, concurrency)
        self.indices: list[int] = []  # prompt of each record
        self._prompts = prompts
        self._order = order
        self._n_requests = n_requests
        self._goal = goal
        self._drained_after, self._salts = drained_after, salts
        self._is_over = False

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
        planned = None if self._goal else self._n_requests
        lasts_s = self._goal.min_s if self._goal else None
        return LoadProgress(self._ended_requests, self._issued, self._tokens, elapsed_s, planned, lasts_s)

    def _send(self) -> None:
        assert self.client is not None
        while len(self.client.calls) < self._max_concurrency and not self._drains() and not self._over():
            index = next(self._order)
            prompt = self._salts.add(self._prompts[index]) if self._salts else self._prompts[index]
            self.indices.append(index)
            self.records.append(Record(len(prompt)))
            self._issued += 1
            self.client.submit(len(self.records) - 1, prompt.tolist(), self._sampling)
        if not self.client.calls:
            self._ended.set_result(None)

    def _drains(self) -> bool:
        assert self.client is not None
        ended = not self._drained_after or self._issued % self._drained_after or not self.client.calls
        return not ended

    def _over(self) -> bool:
        assert self._started is not None
        if self._goal is None:
            return self._issued >= self._n_requests
        if not self._is_over:
            self._is_over = self._goal.is_reached(self._issued, time.perf_counter() - self._started)
        return self._is_over

    def _end(self) -> None:
        self._ended_requests += 1
        asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        if not self._ended.done():
            self._send()

    # --- CallListener ---

    def on_done(self, call: Call) -> None:
        super().on_done(call)
        if self._goal:
            self._goal.add(call.id, self.records[call.id])

    def on_failed(self, call: Call, error: EndpointError) -> None:
        super().on_failed(call, error)
        if self._goal:
            self._goal.add(call.id, self.records[call.id])
