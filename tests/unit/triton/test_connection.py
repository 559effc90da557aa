"""A connection to a server that is not there, or late."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tritonclient.grpc")

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from mpillm.triton.client.connection import GrpcConnection, InferError
from tests.helpers.ports import free_port

WAIT_S = 60.0


def test_a_server_that_is_not_there() -> None:
    port = free_port()
    with (
        GrpcConnection(f"localhost:{port}", 60.0) as connection,
        pytest.raises(InferError, match="failed to connect"),
    ):
        list(connection.infer("tensorrt_llm", {}))


class Late:
    """Answers each request with its id, and the one with id 1 only when it may."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()

    def __getattr__(self, name: str) -> None:
        """Have the names of all other calls, which registering it asks for."""

    def ModelConfig(self, request: Any, context: grpc.ServicerContext) -> Any:
        response = service_pb2.ModelConfigResponse()
        response.config.model_transaction_policy.decoupled = request.name == "decoupled"
        return response

    def ModelInfer(self, request: Any, context: grpc.ServicerContext) -> Any:
        if request.id == "1":
            self.may_answer.wait(WAIT_S)
        output = service_pb2.ModelInferResponse.InferOutputTensor(name="id", datatype="INT32", shape=[1])
        content = np.array([int(request.id)], np.int32).tobytes()
        response = service_pb2.ModelInferResponse(outputs=[output], raw_output_contents=[content])
        response.parameters["triton_final_response"].bool_param = True
        return response

    def ModelStreamInfer(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        for request in requests:
            yield service_pb2.ModelStreamInferResponse(infer_response=self.ModelInfer(request, context))


@pytest.mark.parametrize("model", ["plain", "decoupled"])
def test_a_late_answer_is_not_the_next_request_s(model: str) -> None:
    late, server = Late(), grpc.server(ThreadPoolExecutor(8))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(late, server)
    port = server.add_insecure_port("localhost:0")
    server.start()
    try:
        with GrpcConnection(f"localhost:{port}", 1.0) as connection:
            with pytest.raises(InferError, match="has not answered within 1 s"):
                list(connection.infer(model, {}, request_id="1"))
            late.may_answer.set()
            for id_ in (2, 3):
                (answer,) = connection.infer(model, {}, request_id=str(id_))
                assert answer["id"].tolist() == [id_]
    finally:
        late.may_answer.set()
        server.stop(None).wait(WAIT_S)
