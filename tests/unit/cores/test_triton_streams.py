"""Streams and calls to a server, which here only notes how they end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

pytest.importorskip("tritonclient.grpc")

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from mpillm.nvidia.triton_core.stream import Streams
from mpillm.nvidia.triton_core.tensors import is_last
from tests.helpers.support import wait_until


class Server:
    """Answers a plain call, refuses the one with id 9, and says nothing on a stream, until it ends."""

    def __getattr__(self, name: str) -> None:
        """Have the names of all other calls, which registering it asks for."""

    def ModelInfer(self, request: Any, context: grpc.ServicerContext) -> Any:
        if request.id == "9":
            context.abort(grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size")
        return service_pb2.ModelInferResponse(id=request.id)

    def ModelStreamInfer(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        with contextlib.suppress(grpc.RpcError):
            for _ in requests:
                pass
        yield from ()


def test_calls_and_how_streams_end() -> None:
    """A model that is not decoupled is asked by calls, and only a stream that owes an answer is cancelled."""
    server, heard = grpc.server(ThreadPoolExecutor(8)), list[tuple[str, bool, str]]()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Server(), server)
    port = server.add_insecure_port("localhost:0")
    server.start()
    streams = Streams()

    def done(n: int) -> bool:
        return len(heard) == n

    try:
        streams.connect(
            f"localhost:{port}", 2, lambda _, r, error: heard.append((r.id, is_last(r), error)), n_calls=99
        )
        assert streams.n_channels == 2
        idle, busy = streams.open
        for number in (8, 9):
            request = service_pb2.ModelInferRequest(id=str(number)).SerializeToString()
            idle.ask(number, request, decoupled=False)
            wait_until(partial(done, number - 7), "an answer")
            idle.open.discard(number)
        assert heard == [("8", True, ""), ("9", True, "UNAVAILABLE: Exceeds maximum queue size")]
        busy.ask(10, service_pb2.ModelInferRequest(id="10").SerializeToString(), decoupled=True)
    finally:
        streams.close()
    assert idle.ended == "the server has closed the stream"
    assert busy.ended != idle.ended
    server.stop(None).wait(10)
