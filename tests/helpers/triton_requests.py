"""Requests to the `tensorrt_llm` model of a real tritonserver, and all of their responses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2

from tests.helpers.fuzzing import damaged

_KINDS = {"i4": "INT32", "f4": "FP32", "f2": "FP16", "u8": "UINT64", "b1": "BOOL"}
_TYPES = {kind: np.dtype(code) for code, kind in _KINDS.items()}

Tensors = dict[str, NDArray[Any]]


class Refusal(Exception):
    """Carries the server's message."""


class Asker:
    """Asks a decoupled model over a gRPC stream of its own for each request."""

    def __init__(self, port: int, model: str) -> None:
        import grpc
        from tritonclient.grpc import service_pb2, service_pb2_grpc

        self._message = service_pb2.ModelInferRequest
        most = [(f"grpc.max_{way}_message_length", -1) for way in ("send", "receive")]
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(
            grpc.insecure_channel(f"localhost:{port}", most)
        )
        self._model = model

    def request(self, prompts: list[list[int]], n_output: int, id_: str = "", **tensors: Any) -> Any:
        """Make a ModelInferRequest. `tensors`: the same value for each prompt; NumPy's types count."""
        longest = max(map(len, prompts))
        values: Tensors = {
            "input_ids": np.array([p + [0] * (longest - len(p)) for p in prompts], np.int32),
            "input_lengths": np.array([[len(p)] for p in prompts], np.int32),
            "request_output_len": np.full((len(prompts), 1), n_output, np.int32),
        }
        for name, value in tensors.items():
            array = np.atleast_1d(np.asarray(value))
            if array.dtype in (np.int64, np.float64):
                array = array.astype(np.int32 if array.dtype == np.int64 else np.float32)
            values[name] = np.broadcast_to(array, (len(prompts), *array.shape))
        request = self._message(model_name=self._model, id=id_)
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        for name, value in values.items():
            request.inputs.add(name=name, datatype=_KINDS[value.dtype.str[1:]], shape=value.shape)
            request.raw_input_contents.append(value.tobytes())
        return request

    def responses(self, request: Any, timeout_s: float = 120.0) -> Iterator[Tensors]:
        """Yield the tensors of each response, as they come. Refusal.

        The server ends the stream after the last. If the client ended it in that moment, this tritonserver
        would keep the request, and wait for it for 30 s when it is to end.
        """
        for response in self._stub.ModelStreamInfer(iter([request]), timeout=timeout_s):
            if response.error_message:
                raise Refusal(response.error_message)
            answer = response.infer_response
            yield {
                output.name: np.frombuffer(raw, _TYPES[output.datatype]).reshape(output.shape)
                for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)
            }

    def ask(self, prompts: list[list[int]], n_output: int, **tensors: Any) -> list[Tensors]:
        """Return the responses that have tensors.

        By default no token ends an answer, and no input is in it.
        """
        tensors = {"exclude_input_in_output": True, "end_id": -1, **tensors}
        return [one for one in self.responses(self.request(prompts, n_output, **tensors)) if one]


@st.composite
def responses(draw: st.DrawFn) -> bytes:
    """Draw a serialised ModelInferResponse, damaged or with tensors of any shape and content."""
    made = service_pb2.ModelInferResponse(id=draw(st.sampled_from(["1", "", "x", "9" * 30, "-1", "²"])))
    made.parameters["triton_final_response"].bool_param = draw(st.booleans())
    for name in draw(st.lists(st.sampled_from(["output_ids", "sequence_length", "text_output"]), max_size=3)):
        kind = draw(st.sampled_from(["INT32", "INT64", "BYTES", "FP32", "x"]))
        shape = draw(st.lists(st.integers(-2, 4) | st.just(1 << 40), max_size=3))
        made.outputs.add(name=name, datatype=kind, shape=shape)
        if draw(st.integers(0, 5)):
            made.raw_output_contents.append(draw(st.binary(max_size=24)))
    return draw(st.just(bytes(made.SerializeToString())) | damaged([bytes(made.SerializeToString())], most=2))
