"""One client: a ModelStreamInfer stream to a server, which carries many requests at once.

A stream is one of about a hundred that an HTTP/2 connection carries, whatever the number of its requests.
All streams of a process share one thread with an event loop: with two threads for each, as gRPC's blocking
calls have, a thousand streams spend all of a core on waking up to find nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2

from mpillm.cores.openai_client.client_thread import ClientThread

_log = logging.getLogger(__name__)

STREAMS_PER_CHANNEL = 100
"""Streams at once that a server grants to a connection, if nobody has said otherwise (gRPC's default)."""

MOST_BYTES = (1 << 31) - 1
_OPEN_S = 30.0
_END_S = 5.0
_LIMITS = [("grpc.max_send_message_length", MOST_BYTES), ("grpc.max_receive_message_length", MOST_BYTES)]


def open_channel(url: str) -> grpc.Channel:
    """Return a connection for single questions, which wait for their answers."""
    return grpc.insecure_channel(url, _LIMITS)


class Streams:
    """The streams of a process, and the channels under them, on a thread of their own."""

    def __init__(self) -> None:
        self.thread = ClientThread("mpillm-triton")
        self.open: list[Stream] = []
        self.n_channels = 0
        self._channels: list[grpc.aio.Channel] = []

    def connect(self, url: str, n: int, heard: Heard) -> None:
        """Open `n` streams of a server, on as few channels as carry them."""
        self.thread.run(self._connect(url, n, heard), _OPEN_S)

    async def _connect(self, url: str, n: int, heard: Heard) -> None:
        for i in range(n):
            if i % STREAMS_PER_CHANNEL == 0:
                # channels with equal arguments would share a connection
                own = ("mpillm.channel", self.n_channels)
                self._channels.append(grpc.aio.insecure_channel(url, [*_LIMITS, own]))
                self.n_channels += 1
            infer = self._channels[-1].stream_stream(
                "/inference.GRPCInferenceService/ModelStreamInfer",
                request_serializer=bytes,
                response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
            )
            self.open.append(Stream(url, infer(), heard, self.thread))

    def close(self) -> None:
        """End all streams; nothing more is reported."""
        streams, self.open = self.open, []
        try:
            self.thread.run(self._close(streams), _END_S)
        except TimeoutError:
            _log.warning("%d streams have not ended within %g s", len(streams), _END_S)
        self.thread.stop()

    async def _close(self, streams: list[Stream]) -> None:
        tasks = [task for stream in streams for task in stream.cancel()]
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in self._channels:
            await channel.close()
        self._channels.clear()


class Stream:
    """Sends requests, and calls `heard(stream, response, error)` on the streams' thread for each response.

    `ended`: why nothing more will come; empty while it is open.
    """

    def __init__(self, url: str, call: Any, heard: Heard, thread: ClientThread) -> None:
        self.url = url
        self.ended = ""
        self.heard_at = time.monotonic()
        self.open: set[int] = set()  # ids of requests without their last response; the owner's
        self._call, self._heard, self._thread = call, heard, thread
        self._waiting: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    def send(self, request: bytes) -> None:
        """Send a serialised ModelInferRequest soon; called from any thread."""
        self._waiting.append(request)
        if len(self._waiting) <= 1:  # else the writer is at work, and will find it
            self._thread.post(self._wake.set)

    def ask(self, number: int, request: bytes) -> None:
        """Send a request that has an answer, as `send`. `number`: its id."""
        if not self.open:
            self.heard_at = time.monotonic()  # its silence counts from now on
        self.open.add(number)
        self.send(request)

    # --- on the streams' thread ---

    def cancel(self) -> list[asyncio.Task[None]]:
        """Cancel its tasks, which end soon."""
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        return self._tasks

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
