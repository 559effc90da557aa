"""One client: a ModelStreamInfer stream to a server, with many concurrent requests.

An HTTP/2 connection carries about a hundred streams, whatever the number of their requests. All streams of a
process share one thread with an event loop. gRPC's blocking calls would need two threads per stream, and with
a thousand streams their wake-ups alone use a whole CPU core.

A model that is not decoupled gets each request by a ModelInfer call, which also counts as a stream of the
connection. Over a stream, tritonserver can crash: when it responds, it writes to a request's state that its
other thread may have freed (`StreamInferResponseComplete` in stream_infer_handler.cc, 2.51 to 2.73).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2

from launch.bounded_http import GRPC_OPTIONS
from mpillm.cores.openai_client.client_thread import ClientThread

_log = logging.getLogger(__name__)

STREAMS_PER_CHANNEL = 100
"""Concurrent streams of a connection that a server allows by default (gRPC)."""

_OPEN_S = 30.0
_END_S = 5.0
_CLOSE_S = 2.0
_NOTICE_S = 1.0
_SERVICE = "/inference.GRPCInferenceService/"


def open_channel(url: str) -> grpc.Channel:
    """Return a connection for blocking calls."""
    return grpc.insecure_channel(url, GRPC_OPTIONS)


class StreamPool:
    """Streams of a process and their channels, on a separate thread."""

    def __init__(self, options: Sequence[tuple[str, int]] = GRPC_OPTIONS) -> None:
        """`options`: gRPC's, of each channel."""
        self._options = options
        self.thread = ClientThread("mpillm-triton")
        self.open: list[InferStream] = []
        self._channels: list[grpc.aio.Channel] = []

    def connect(self, url: str, n: int, on_response: OnResponse, n_calls: int = 0) -> None:
        """Open `n` streams of a server, on as few channels as carry them and `n_calls` ModelInfer calls."""
        self.thread.run(self._connect(url, n, on_response, n_calls), _OPEN_S)

    async def _connect(self, url: str, n: int, on_response: OnResponse, n_calls: int) -> None:
        channels = [self._channel(url) for _ in range(math.ceil((n + n_calls) / STREAMS_PER_CHANNEL))]
        calls = itertools.cycle(
            [
                channel.unary_unary(
                    f"{_SERVICE}ModelInfer",
                    request_serializer=bytes,
                    response_deserializer=service_pb2.ModelInferResponse.FromString,
                )
                for channel in channels
            ]
        )
        for i in range(n):
            infer = channels[i % len(channels)].stream_stream(
                f"{_SERVICE}ModelStreamInfer",
                request_serializer=bytes,
                response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
            )
            self.open.append(InferStream(url, infer(), calls, on_response, self.thread))

    def _channel(self, url: str) -> grpc.aio.Channel:
        # channels with equal arguments would share a connection
        own = ("mpillm.channel", len(self._channels))
        self._channels.append(grpc.aio.insecure_channel(url, [*self._options, own]))
        return self._channels[-1]

    @property
    def n_channels(self) -> int:
        """Number of open channels."""
        return len(self._channels)

    def close(self) -> None:
        """End all streams; nothing more is reported."""
        streams, self.open = self.open, []
        try:
            self.thread.run(self._close(streams), _END_S)
        except TimeoutError:
            _log.warning("%d streams have not ended within %g s", len(streams), _END_S)
        self.thread.stop()

    async def _close(self, streams: list[InferStream]) -> None:
        await asyncio.gather(*(stream.end() for stream in streams))
        for channel in self._channels:
            await channel.close()
        self._channels.clear()


class InferStream:
    """Sends requests; calls `on_response(stream, response, error)` on the streams' thread for each response.

    `ended`: why the stream has ended; empty while it is open. `silent_since`: time of the last response, or
    of the request since when responses are outstanding.
    """

    def __init__(
        self, url: str, call: Any, calls: Iterator[Any], on_response: OnResponse, thread: ClientThread
    ) -> None:
        """`calls`: yields ModelInfer calls, for models that are not decoupled."""
        self.url = url
        self.ended = ""
        self.silent_since = time.monotonic()
        self.open: set[int] = set()  # ids of requests without their final response; the owner removes them
        self._call, self._calls, self._on_response, self._thread = call, calls, on_response, thread
        self._waiting: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._reader = asyncio.create_task(self._read())
        self._tasks = {self._reader, asyncio.create_task(self._write())}

    def send(self, number: int, request: bytes, decoupled: bool) -> None:
        """Queue a serialized ModelInferRequest; called from any thread.

        `number`: its id. `decoupled`: whether its model is decoupled.
        """
        if not decoupled:
            self._thread.post(self._infer, number, request)
            return
        self._waiting.append(request)
        if len(self._waiting) <= 1:  # otherwise the writer is active and will send it
            self._thread.post(self._wake.set)

    def submit(self, number: int, request: bytes, decoupled: bool) -> None:
        """Send a request and count it as outstanding. Args: see `send`."""
        if not self.open:
            self.silent_since = time.monotonic()
        self.open.add(number)
        self.send(number, request, decoupled)

    # --- on the streams' thread ---

    async def end(self) -> None:
        """Close the stream; cancel it only if requests are outstanding.

        tritonserver 2.51 can crash when it cancels requests that have ended.
        """
        if not self.open and not self.ended:
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                await self._call.done_writing()
            await asyncio.wait([self._reader], timeout=_CLOSE_S)
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _infer(self, number: int, request: bytes) -> None:
        task = asyncio.create_task(self._one(number, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _one(self, number: int, request: bytes) -> None:
        error = ""
        try:
            response = await next(self._calls)(request)
        except grpc.aio.AioRpcError as failure:
            if failure.code() is grpc.StatusCode.UNAVAILABLE:
                await asyncio.wait([self._reader], timeout=_NOTICE_S)
                if self.ended:
                    return  # `ended` reports the loss of the server
            response, error = service_pb2.ModelInferResponse(id=str(number)), error_text(failure)
        self.silent_since = time.monotonic()
        response.parameters["triton_final_response"].bool_param = True
        try:
            self._on_response(self, response, error)
        except Exception as failure:  # noqa: BLE001 - the rank's main thread reports it
            self.ended = f"{type(failure).__name__}: {failure}"

    async def _write(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._waiting:
                    await self._call.write(self._waiting[0])
                    self._waiting.popleft()  # last: `send` wakes the writer only if the queue is empty
        except (grpc.RpcError, asyncio.InvalidStateError):
            return  # the reader records why the stream has ended

    async def _read(self) -> None:
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                self.silent_since = time.monotonic()
                self._on_response(self, response.infer_response, response.error_message)
            status, details = await self._call.code(), await self._call.details()
            is_closed = status is grpc.StatusCode.OK
            self.ended = "the server has closed the stream" if is_closed else _text(status, details)
        except grpc.RpcError as error:
            self.ended = error_text(error)
        except Exception as error:  # noqa: BLE001 - the rank's main thread reports it
            self.ended = f"{type(error).__name__}: {error}"


OnResponse = Callable[[InferStream, Any, str], None]


def error_text(error: grpc.RpcError) -> str:
    """Format a call's failure."""
    if not isinstance(error, (grpc.Call, grpc.aio.AioRpcError)):
        return str(error)
    return _text(error.code(), error.details())


def _text(code: grpc.StatusCode, details: str | None) -> str:
    return f"{code.name}: {details}"
