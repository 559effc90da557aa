"""One client: a ModelStreamInfer stream to a server, which carries many requests at once.

A stream is one of about a hundred that an HTTP/2 connection carries, whatever the number of its requests.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
from tritonclient.grpc import service_pb2_grpc

_log = logging.getLogger(__name__)

STREAMS_PER_CHANNEL = 100
"""Streams at once that a server grants to a connection, if nobody has said otherwise (gRPC's default)."""

MOST_BYTES = (1 << 31) - 1
_END_S = 5.0


def open_channel(url: str, index: int) -> grpc.Channel:
    """Open a connection. `index`: channels with equal arguments would share one."""
    return grpc.insecure_channel(
        url,
        [
            ("grpc.max_send_message_length", MOST_BYTES),
            ("grpc.max_receive_message_length", MOST_BYTES),
            ("mpillm.channel", index),
        ],
    )


class Stream:
    """Sends requests, and calls `heard(stream, response, error)` on a thread of its own for each response.

    `ended`: why nothing more will come; empty while it is open.
    """

    def __init__(self, url: str, channel: grpc.Channel, heard: Callable[[Stream, Any, str], None]) -> None:
        self.url = url
        self.ended = ""
        self.heard_at = time.monotonic()
        self.open: set[int] = set()  # ids of requests without their last response; the owner's
        self._heard = heard
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self._call = stub.ModelStreamInfer(iter(self._queue.get, None))
        self._thread = threading.Thread(target=self._run, name=f"mpillm-triton {url}", daemon=True)
        self._thread.start()

    def send(self, request: Any) -> None:
        self._queue.put(request)

    def ask(self, number: int, request: Any) -> None:
        """Send a request that has an answer. `number`: its id."""
        if not self.open:
            self.heard_at = time.monotonic()  # its silence counts from now on
        self.open.add(number)
        self._queue.put(request)

    def close(self) -> None:
        """End the stream; nothing more is reported."""
        self._queue.put(None)
        self._call.cancel()
        self._thread.join(_END_S)
        if self._thread.is_alive():
            _log.warning("the stream of tritonserver %s has not ended within %g s", self.url, _END_S)

    def _run(self) -> None:
        try:
            for response in self._call:
                self.heard_at = time.monotonic()
                self._heard(self, response.infer_response, response.error_message)
            self.ended = "the server has closed the stream"
        except grpc.RpcError as error:
            self.ended = error_text(error)
        except Exception as error:  # noqa: BLE001 - the rank's main thread reports it
            self.ended = f"{type(error).__name__}: {error}"


def error_text(error: grpc.RpcError) -> str:
    """Return a call's failure in a line."""
    if not isinstance(error, grpc.Call):
        return str(error)
    text = f"{error.code().name}: {error.details()}"
    if "Socket closed" in text:  # what was accepted, and closed at gRPC's first bytes
        text += " (Triton's HTTP port answers so; gRPC has a port of its own, 8001 by default)"
    return text
