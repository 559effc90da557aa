"""One client: a ModelStreamInfer stream to a server, which carries many requests at once.

A stream is one of about a hundred that an HTTP/2 connection carries, whatever the number of its requests.
All streams of a process share one thread with an event loop: with two threads for each, as gRPC's blocking
calls have, a thousand streams spend all of a core on waking up to find nothing.

A model that is not decoupled is asked by ModelInfer calls of their own instead, each of which is one of that
hundred: when a stream has its answer, tritonserver writes to a request's state that its other thread may have
freed by then (`StreamInferResponseComplete` in its stream_infer_handler.cc, 2.51 to 2.73), and crashes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2

from launch.bounded_http import OF_GRPC
from mpillm.cores.openai_client.client_thread import ClientThread

_log = logging.getLogger(__name__)

STREAMS_PER_CHANNEL = 100
"""Streams at once that a server grants to a connection, if nobody has said otherwise (gRPC's default)."""

_OPEN_S = 30.0
_END_S = 5.0
_CLOSE_S = 2.0
_NOTICE_S = 1.0
_SERVICE = "/inference.GRPCInferenceService/"


def open_channel(url: str) -> grpc.Channel:
    """Return a connection for single questions, which wait for their answers."""
    return grpc.insecure_channel(url, OF_GRPC)


class Streams:
    """The streams of a process, and the channels under them, on a thread of their own."""

    def __init__(self) -> None:
        self.thread = ClientThread("mpillm-triton")
        self.open: list[Stream] = []
        self._channels: list[grpc.aio.Channel] = []

    def connect(self, url: str, n: int, heard: Heard, n_calls: int = 0) -> None:
        """Open `n` streams of a server, on as few channels as carry them and `n_calls` ModelInfer calls."""
        self.thread.run(self._connect(url, n, heard, n_calls), _OPEN_S)

    async def _connect(self, url: str, n: int, heard: Heard, n_calls: int) -> None:
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
            self.open.append(Stream(url, infer(), calls, heard, self.thread))

    def _channel(self, url: str) -> grpc.aio.Channel:
        # channels with equal arguments would share a connection
        own = ("mpillm.channel", len(self._channels))
        self._channels.append(grpc.aio.insecure_channel(url, [*OF_GRPC, own]))
        return self._channels[-1]

    @property
    def n_channels(self) -> int:
        """How many channels are open."""
        return len(self._channels)

    def close(self) -> None:
        """End all streams; nothing more is reported."""
        streams, self.open = self.open, []
        try:
            self.thread.run(self._close(streams), _END_S)
        except TimeoutError:
            _log.warning("%d streams have not ended within %g s", len(streams), _END_S)
        self.thread.stop()

    async def _close(self, streams: list[Stream]) -> None:
        await asyncio.gather(*(stream.end() for stream in streams))
        for channel in self._channels:
            await channel.close()
        self._channels.clear()


class Stream:
    """Sends requests, and calls `heard(stream, response, error)` on the streams' thread for each response.

    `ended`: why nothing more will come; empty while it is open.
    """

    def __init__(self, url: str, call: Any, calls: Iterator[Any], heard: Heard, thread: ClientThread) -> None:
        """`calls`: the next one is what a request to a model that is not decoupled goes through."""
        self.url = url
        self.ended = ""
        self.heard_at = time.monotonic()
        self.open: set[int] = set()  # ids of requests without their last response; the owner's
        self._call, self._calls, self._heard, self._thread = call, calls, heard, thread
        self._waiting: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._reader = asyncio.create_task(self._read())
        self._tasks = {self._reader, asyncio.create_task(self._write())}

    def send(self, number: int, request: bytes, decoupled: bool) -> None:
        """Send a serialised ModelInferRequest soon; called from any thread.

        `number`: its id. `decoupled`: whether its model is.
        """
        if not decoupled:
            self._thread.post(self._infer, number, request)
            return
        self._waiting.append(request)
        if len(self._waiting) <= 1:  # else the writer is at work, and will find it
            self._thread.post(self._wake.set)

    def ask(self, number: int, request: bytes, decoupled: bool) -> None:
        """Send a request whose answer somebody waits for, as `send`."""
        if not self.open:
            self.heard_at = time.monotonic()  # its silence counts from now on
        self.open.add(number)
        self.send(number, request, decoupled)

    # --- on the streams' thread ---

    async def end(self) -> None:
        """End it with nothing left to do, as the server expects.

        Only one with open requests is cancelled: tritonserver 2.51 can crash when it cancels what has ended.
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
                    return  # the server is gone, and owes this answer
            response, error = service_pb2.ModelInferResponse(id=str(number)), error_text(failure)
        self.heard_at = time.monotonic()
        response.parameters["triton_final_response"].bool_param = True
        try:
            self._heard(self, response, error)
        except Exception as failure:  # noqa: BLE001 - the rank's main thread reports it
            self.ended = f"{type(failure).__name__}: {failure}"

    async def _write(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._waiting:
                    await self._call.write(self._waiting[0])
                    self._waiting.popleft()  # only now: an empty queue says that nobody is here
        except (grpc.RpcError, asyncio.InvalidStateError):
            return  # the reader says why the stream has ended

    async def _read(self) -> None:
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                self.heard_at = time.monotonic()
                self._heard(self, response.infer_response, response.error_message)
            status, details = await self._call.code(), await self._call.details()
            is_closed = status is grpc.StatusCode.OK
            self.ended = "the server has closed the stream" if is_closed else _text(status, details)
        except grpc.RpcError as error:
            self.ended = error_text(error)
        except Exception as error:  # noqa: BLE001 - the rank's main thread reports it
            self.ended = f"{type(error).__name__}: {error}"


Heard = Callable[[Stream, Any, str], None]


def error_text(error: grpc.RpcError) -> str:
    """Return a call's failure in a line."""
    if not isinstance(error, (grpc.Call, grpc.aio.AioRpcError)):
        return str(error)
    return _text(error.code(), error.details())


def _text(code: grpc.StatusCode, details: str | None) -> str:
    return f"{code.name}: {details}"
