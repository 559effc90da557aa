"""Load on the engine's model of a tritonserver, over gRPC or HTTP, and the record of each request."""

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

from launch.outside import one_line
from mpillm.experiments.loadtest.load_test import Record
from mpillm.files import excerpt
from mpillm.triton.client.connection import AnswerError
from mpillm.triton.client.kserve_http import HttpConnection
from mpillm.triton.core.stream import Stream, Streams, open_channel
from mpillm.triton.core.tensors import NO_END, Wanted, is_last, request_of, tokens_of
from mpillm.triton.core.triton_ready import TritonError, find_models, until_ready

_LOOK_S = 1.0


class Request(NamedTuple):
    """Holds a request's prompt, and the length of its answer, which no token ends."""

    prompt: NDArray[np.int32]
    output_len: int


class Target(NamedTuple):
    """Says where requests go, and for how long nothing may come from there while answers are owed."""

    url: str
    model: str
    timeout_s: float
    streaming: bool  # over HTTP


def over_grpc(
    target: Target, requests: Sequence[Request], due: NDArray[np.float64], most_at_once: int
) -> list[Record]:
    """Send all requests over one stream, or a call each; return the record of each.

    Raises TritonError if the server is not there, or is silent.
    """
    channel = open_channel(target.url)
    try:
        until_ready(target.url, channel, target.timeout_s)
        (model,) = find_models(target.url, channel, target.model, target.timeout_s)
    finally:
        channel.close()
    load = _GrpcLoad(target, requests, most_at_once, model.decoupled)
    streams = Streams()
    try:
        streams.connect(target.url, 1, load.heard, 0 if model.decoupled else min(most_at_once, len(requests)))
        load.run(streams.open[0], due)
    finally:
        streams.close()
    return load.records


class _GrpcLoad:
    def __init__(
        self, target: Target, requests: Sequence[Request], most_at_once: int, decoupled: bool
    ) -> None:
        self.records = [Record(len(request.prompt)) for request in requests]
        self._target, self._requests, self._decoupled = target, requests, decoupled
        self._room = threading.Semaphore(most_at_once)
        self._left = len(requests)
        self._ended = threading.Event()

    def run(self, stream: Stream, due: NDArray[np.float64]) -> None:
        """Send each request when it is due and there is room, and wait for all answers.

        Raises TritonError.
        """
        began = time.perf_counter()
        for number, (request, at) in enumerate(zip(self._requests, due.tolist(), strict=True)):
            if (wait := began + at - time.perf_counter()) > 0:
                time.sleep(wait)
            while not self._room.acquire(timeout=_LOOK_S):
                self._look(stream)
            wanted = Wanted(request.output_len, end_id=NO_END, streaming=self._decoupled)
            message = request_of(self._target.model, str(number + 1), request.prompt, wanted)
            self.records[number].start = time.perf_counter()
            stream.ask(number + 1, message, self._decoupled)
        while not self._ended.wait(_LOOK_S):
            self._look(stream)

    def _look(self, stream: Stream) -> None:
        if stream.ended:
            raise TritonError(f"tritonserver {stream.url} owes {len(stream.open)} answers: {stream.ended}")
        if stream.open and time.monotonic() - stream.heard_at > self._target.timeout_s:
            raise TritonError(
                f"tritonserver {stream.url} has said nothing for {self._target.timeout_s:g} s,"
                f" and owes {len(stream.open)} answers"
            )

    def heard(self, stream: Stream, response: Any, error: str) -> None:
        """Note a response; called on the stream's thread."""
        now = time.perf_counter()
        number = int(response.id or 0)
        if not number:
            raise ValueError(error or "a response without an id")
        if number not in stream.open:  # it has failed by then, or nobody has asked
            return
        record = self.records[number - 1]
        try:
            if error:
                raise AnswerError(error)
            _note(record, self._requests[number - 1], now, len(tokens_of(response)))
        except AnswerError as failure:
            record.error = one_line(str(failure))
        if record.error or is_last(response):
            _end(record)
            stream.open.discard(number)
            self._room.release()
            self._left -= 1
            if not self._left:
                self._ended.set()


def _note(record: Record, request: Request, now: float, n_tokens: Any) -> None:
    """Note a response with so many tokens, as a server says.

    Raises AnswerError if it can't have them.
    """
    most = len(request.prompt) + request.output_len - record.output_len
    if type(n_tokens) is not int or not 0 <= n_tokens <= most:
        raise AnswerError(f"an answer of {excerpt(n_tokens)} tokens, to a request for {request.output_len}")
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
    """Note that the last response has come."""
    if not record.output_len and not record.error:
        record.error = "an answer without a token"


def over_http(
    target: Target, requests: Sequence[Request], due: NDArray[np.float64], most_at_once: int
) -> list[Record]:
    """Send as many requests at once as there are connections, to `generate` or `generate_stream`; return the
    record of each."""
    records = [Record(len(request.prompt)) for request in requests]
    idle: SimpleQueue[HttpConnection] = SimpleQueue()
    n = min(most_at_once, len(requests))
    with ExitStack() as stack, ThreadPoolExecutor(n) as threads:
        for _ in range(n):
            idle.put(stack.enter_context(HttpConnection(target.url, target.timeout_s)))

        def send(request: Request, record: Record) -> None:
            connection = idle.get()
            try:
                record.start = time.perf_counter()
                for part in connection.generate(target.model, _values(target, request), target.streaming):
                    _note(record, request, time.perf_counter(), part.get("sequence_length", 0))
                _end(record)
            except AnswerError as error:
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


def _values(target: Target, request: Request) -> dict[str, Any]:
    return {
        "input_ids": request.prompt.tolist(),
        "input_lengths": len(request.prompt),
        "request_output_len": request.output_len,
        "end_id": NO_END,
        "exclude_input_in_output": True,
        "streaming": target.streaming,
    }


def arrival_times(n: int, rate: float, is_constant: bool, random: np.random.Generator) -> NDArray[np.float64]:
    """Return when each of `n` requests is due, in seconds: all at once if `rate` is not above 0."""
    if rate <= 0:
        return np.zeros(n)
    delays = np.full(n, 1 / rate) if is_constant else random.exponential(1 / rate, n)
    return np.cumsum(delays)


def lengths(mean: float, stdev: float, n: int, random: np.random.Generator) -> list[int]:
    """Draw `n` lengths from a normal distribution, rounded up, at least 1."""
    return [max(1, int(value)) for value in np.ceil(random.normal(mean, stdev, n)).tolist()]
