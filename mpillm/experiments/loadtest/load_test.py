"""Send requests to a server, at a rate or as fast as it answers, and record each."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mpillm.cores.openai_client.call import Call
from mpillm.cores.openai_client.client import Client
from mpillm.cores.openai_client.dialect import Sampling
from mpillm.cores.openai_client.endpoint import EndpointError
from mpillm.report.console import LoadProgress


@dataclass
class Record:
    """One request. Times are in seconds; `start` is time.perf_counter() when it was sent."""

    prompt_len: int
    start: float = 0.0
    queue_time: float = 0.0  # from its arrival until it was sent
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)  # between pieces of the stream
    latency: float = 0.0  # until the last token
    output_len: int = 0
    counted: tuple[int, int] | None = None  # prompt tokens and cached ones, by the server; None: unknown
    text: str = ""
    error: str = ""

    @property
    def tpot(self) -> float:
        """Time per output token after the first; 0 for an answer of one token."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0


def arrivals(
    n: int, rate: float | None, burstiness: float, random: np.random.Generator
) -> NDArray[np.float64]:
    """Return the arrival time of each of `n` requests, in seconds from the start; all 0 if `rate` is None.

    Intervals are gamma distributed with shape `burstiness` (1: a Poisson process; less is more bursty), and
    scaled so that their sum is n / rate, like `vllm bench serve`.
    """
    if rate is None:
        return np.zeros(n)
    due: NDArray[np.float64] = np.cumsum(random.gamma(burstiness, 1 / (rate * burstiness), n))
    due *= n / rate / due[-1]
    return due


class LoadTest:
    """Sends requests with a client and receives its events, on the client's event loop."""

    def __init__(
        self,
        prompts: Sequence[NDArray[np.int32]],
        due: NDArray[np.float64],
        sampling: Sampling,
        max_concurrency: int | None,
    ) -> None:
        self.records = [Record(len(prompt)) for prompt in prompts]
        self.client: Client | None = None
        self._prompts = prompts
        self._due = due
        self._sampling = sampling
        self._max_concurrency = max_concurrency or len(prompts)
        self._waiting: deque[tuple[int, float]] = deque()  # index, arrival
        self._started: float | None = None  # time.perf_counter()
        self._issued = self._ended_requests = self._tokens = 0

    async def run(self, client: Client) -> float:
        """Send all requests and wait for all answers; return the duration in seconds."""
        self.client = client
        client.listener = self
        self._ended = asyncio.get_running_loop().create_future()
        self._started = start = time.perf_counter()
        for index, due in enumerate(self._due.tolist()):
            if (wait := start + due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            self._waiting.append((index, time.perf_counter()))
            self._send()
        await self._ended
        return time.perf_counter() - start

    def progress(self) -> LoadProgress | None:
        """Return the test's progress; None before its start. Called from any thread."""
        return None if self._started is None else self._so_far(time.perf_counter() - self._started)

    def _so_far(self, elapsed_s: float) -> LoadProgress:
        planned, lasts_s = len(self._prompts), float(self._due[-1]) or None
        return LoadProgress(self._ended_requests, self._issued, self._tokens, elapsed_s, planned, lasts_s)

    def _send(self) -> None:
        assert self.client is not None
        while self._waiting and len(self.client.calls) < self._max_concurrency:
            index, arrival = self._waiting.popleft()
            self.records[index].queue_time = time.perf_counter() - arrival
            self._issued += 1
            self.client.submit(index, self._prompts[index].tolist(), self._sampling)

    def _end(self) -> None:
        """Count an ended request. The client removes it after this call."""
        self._ended_requests += 1
        if self._ended_requests == len(self.records):
            self._ended.set_result(None)
        elif self._waiting:
            asyncio.get_running_loop().call_soon(self._send)

    # --- CallListener ---

    def on_first(self, call: Call) -> None:
        """Do nothing: the answer records all times."""

    def on_done(self, call: Call) -> None:
        record, times = self.records[call.id], call.answer.times
        record.start = call.sent_at
        record.ttft = times[0] - call.sent_at
        record.itl = np.diff(times).tolist()
        record.latency = times[-1] - call.sent_at
        record.output_len = call.answer.completion_tokens or call.answer.size
        record.text = call.answer.text
        if call.answer.prompt_tokens is not None and call.answer.cached_tokens is not None:
            record.counted = call.answer.prompt_tokens, call.answer.cached_tokens
        self._tokens += record.output_len
        self._end()

    def on_failed(self, call: Call, error: EndpointError) -> None:
        record = self.records[call.id]
        record.start, record.error = call.sent_at, str(error)
        self._end()

    def on_cancelled(self, call: Call) -> None:
        """Do nothing: no request is cancelled."""
