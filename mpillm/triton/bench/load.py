"""Put load on the engine's model of a tritonserver, over gRPC or HTTP, and record each request."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from launch.safe_text import one_line
from mpillm.experiments.loadtest.load_test import Record
from mpillm.files import excerpt
from mpillm.triton.bench.load_request import LoadRequest
from mpillm.triton.client.connection import InferError
from mpillm.triton.client.kserve_http import KServeConnection
from mpillm.triton.core.stream import InferStream, StreamPool, open_channel
from mpillm.triton.core.tensors import NO_END, InferParams, is_last, request_of, tokens_of
from mpillm.triton.core.triton_ready import TritonError, find_models, until_ready

_LOOK_S = 1.0


class Target(NamedTuple):
    """Destination of requests, and its longest silence with outstanding requests."""

    url: str
    model: str
    timeout_s: float
    streaming: bool  # over HTTP


def over_grpc(
    target: Target, requests: Sequence[LoadRequest], due: NDArray[np.float64], max_open: int
) -> list[Record]:
    """Send all requests over one stream, or by one call each; return their records.

    Raises TritonError if the server is unreachable or silent.
    """
    channel = open_channel(target.url)
    try:
        until_ready(target.url, channel, target.timeout_s)
        (model,) = find_models(target.url, channel, target.model, target.timeout_s)
    finally:
        channel.close()
    load = _GrpcLoad(target, requests, max_open, model.decoupled)
    streams = StreamPool()
    try:
        streams.connect(target.url, 1, load.receive, 0 if model.decoupled else min(max_open, len(requests)))
        load.run(streams.open[0], due)
    finally:
        streams.close()
    return load.records


class _GrpcLoad:
    def __init__(
        self, target: Target, requests: Sequence[LoadRequest], max_open: int, decoupled: bool
    ) -> None:
        self.records = [Record(len(request.prompt)) for request in requests]
        self._target, self._requests, self._decoupled = target, requests, decoupled
        self._slots = threading.Semaphore(max_open)
        self._left = len(requests)
        self._ended = threading.Event()

    def run(self, stream: InferStream, due: NDArray[np.float64]) -> None:
        """Send each request when it is due and a slot is free; wait for all answers. Raises TritonError."""
        began = time.perf_counter()
        for number, (request, at) in enumerate(zip(self._requests, due.tolist(), strict=True)):
            if (wait := began + at - time.perf_counter()) > 0:
                time.sleep(wait)
            while not self._slots.acquire(timeout=_LOOK_S):
                self._look(stream)
            params = InferParams(request.output_len, end_id=NO_END, streaming=self._decoupled)
            message = request_of(self._target.model, str(number + 1), request.prompt, params)
            self.records[number].start = time.perf_counter()
            stream.submit(number + 1, message, self._decoupled)
        while not self._ended.wait(_LOOK_S):
            self._look(stream)

    def _look(self, stream: InferStream) -> None:
        limit_s, outstanding = self._target.timeout_s, f"outstanding requests: {len(stream.open)}"
        if stream.ended:
            raise TritonError(f"tritonserver {stream.url}: {stream.ended}; {outstanding}")
        if stream.open and time.monotonic() - stream.silent_since > limit_s:
            raise TritonError(f"tritonserver {stream.url}: no response for {limit_s:g} s; {outstanding}")

    def receive(self, stream: InferStream, response: Any, error: str) -> None:
        """Record a response; called on the stream's thread."""
        now = time.perf_counter()
        number = int(response.id or 0)
        if not number:
            raise ValueError(error or "a response without an id")
        if number not in stream.open:  # the request has failed, or does not exist
            return
        record = self.records[number - 1]
        try:
            if error:
                raise InferError(error)
            _record(record, self._requests[number - 1], now, len(tokens_of(response)))
        except InferError as failure:
            record.error = one_line(str(failure))
        if record.error or is_last(response):
            _end(record)
            stream.open.discard(number)
            self._slots.release()
            self._left -= 1
            if not self._left:
                self._ended.set()


def _record(record: Record, request: LoadRequest, now: float, n_tokens: Any) -> None:
    """Record a response with `n_tokens`. Raises InferError if that number is impossible."""
    max_tokens = len(request.prompt) + request.output_len - record.output_len
    if type(n_tokens) is not int or not 0 <= n_tokens <= max_tokens:
        raise InferError(f"an answer of {excerpt(n_tokens)} tokens, to a request for {request.output_len}")
    if not n_tokens:
        return
    elapsed = now - record.start
    if record.output_len:
        record.itl.append(elapsed - record.latency)
    else:
        record.ttft = elapsed
    record.latency = elapsed
    record.output_len += n_tokens


def _end(record: Record) -> None:
    """Record the last response."""
    if not record.output_len and not record.error:
        record.error = "an answer without a token"


def over_http(
    target: Target, requests: Sequence[LoadRequest], due: NDArray[np.float64], max_open: int
) -> list[Record]:
    """Send each request to `generate` or `generate_stream` over a free connection; return their records."""
    records = [Record(len(request.prompt)) for request in requests]
    idle: SimpleQueue[KServeConnection] = SimpleQueue()
    n = min(max_open, len(requests))
    with ExitStack() as stack, ThreadPoolExecutor(n) as threads:
        for _ in range(n):
            idle.put(stack.enter_context(KServeConnection(target.url, target.timeout_s)))

        def send(request: LoadRequest, record: Record) -> None:
            connection = idle.get()
            try:
                record.start = time.perf_counter()
                for part in connection.generate(target.model, _values(target, request), target.streaming):
                    _record(record, request, time.perf_counter(), part.get("sequence_length", 0))
                _end(record)
            except InferError as error:
                record.error = str(error)
            finally:
                idle.put(connection)

        sent: list[Future[None]] = []
        began = time.perf_counter()
        for request, record, at in zip(requests, records, due.tolist(), strict=True):
            if (wait := began + at - time.perf_counter()) > 0:
                time.sleep(wait)
            sent.append(threads.submit(send, request, record))
    for one in sent:
        one.result()
    return records


def _values(target: Target, request: LoadRequest) -> dict[str, Any]:
    return {
        "input_ids": request.prompt.tolist(),
        "input_lengths": len(request.prompt),
        "request_output_len": request.output_len,
        "end_id": NO_END,
        "exclude_input_in_output": True,
        "streaming": target.streaming,
    }


def arrival_times(n: int, rate: float, is_constant: bool, random: np.random.Generator) -> NDArray[np.float64]:
    """Return when each of `n` requests is due, in seconds: all at 0 unless `rate` is above 0."""
    if rate <= 0:
        return np.zeros(n)
    delays = np.full(n, 1 / rate) if is_constant else random.exponential(1 / rate, n)
    return np.cumsum(delays)
