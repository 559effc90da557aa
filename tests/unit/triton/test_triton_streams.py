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

from launch.bounded_http import GRPC_OPTIONS, MAX_ANSWER_BYTES
from mpillm.triton.client import connection
from mpillm.triton.core.stream import StreamPool
from mpillm.triton.core.tensors import is_last
from tests.helpers.support import wait_until

LARGE = 1 << 16


class Server:
    """Answers a plain call, refuses the one with id 9, and says nothing on a stream, until it ends.

    What answers the one with id 7 is `LARGE`.
    """

    def __getattr__(self, name: str) -> None:
        """Have the names of all other calls, which registering it asks for."""

    def ModelInfer(self, request: Any, context: grpc.ServicerContext) -> Any:
        if request.id == "9":
            context.abort(grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size")
        if request.id == "7":
            return service_pb2.ModelInferResponse(raw_output_contents=[bytes(LARGE)])
        return service_pb2.ModelInferResponse(id=request.id)

    def ModelConfig(self, request: Any, context: grpc.ServicerContext) -> Any:
        return service_pb2.ModelConfigResponse()

    def ModelStreamInfer(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        with contextlib.suppress(grpc.RpcError):
            for _ in requests:
                pass
        yield from ()


@pytest.fixture
def url() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(8))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Server(), server)
    port = server.add_insecure_port("localhost:0")
    server.start()
    yield f"localhost:{port}"
    server.stop(None).wait(300)


def test_no_message_of_a_server_has_more_bytes_than_an_answer_may_have(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for a core nor for a client, whose library would take 2 GiB."""
    assert dict(GRPC_OPTIONS)["grpc.max_receive_message_length"] == MAX_ANSWER_BYTES
    few = [("grpc.max_receive_message_length", LARGE)]
    monkeypatch.setattr(connection, "GRPC_OPTIONS", few)
    errors, streams = list[str](), StreamPool(few)
    try:
        streams.connect(url, 1, lambda _, response, error: errors.append(error), n_calls=1)
        request = service_pb2.ModelInferRequest(id="7").SerializeToString()
        streams.open[0].submit(7, request, decoupled=False)
        wait_until(lambda: bool(errors), "an answer")
        streams.open[0].open.clear()
    finally:
        streams.close()
    assert errors[0].startswith("RESOURCE_EXHAUSTED: ")
    with (
        connection.GrpcConnection(url, 60.0) as client,
        pytest.raises(connection.InferError, match="larger than max"),
    ):
        list(client.infer("m", {}, request_id="7"))


def test_calls_and_how_streams_end(url: str) -> None:
    """A model that is not decoupled gets calls, and only a stream with outstanding requests is cancelled."""
    answers, streams = list[tuple[str, bool, str]](), StreamPool()

    def done(n: int) -> bool:
        return len(answers) == n

    try:
        streams.connect(url, 2, lambda _, r, error: answers.append((r.id, is_last(r), error)), n_calls=99)
        assert streams.n_channels == 2
        idle, busy = streams.open
        for number in (8, 9):
            request = service_pb2.ModelInferRequest(id=str(number)).SerializeToString()
            idle.submit(number, request, decoupled=False)
            wait_until(partial(done, number - 7), "an answer")
            idle.open.discard(number)
        assert answers == [("8", True, ""), ("9", True, "UNAVAILABLE: Exceeds maximum queue size")]
        busy.submit(10, service_pb2.ModelInferRequest(id="10").SerializeToString(), decoupled=True)
    finally:
        streams.close()
    assert idle.ended == "the server has closed the stream"
    assert busy.ended != idle.ended
