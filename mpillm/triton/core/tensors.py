"""Requests to the `tensorrt_llm` model and its responses, in Triton's gRPC protocol (KServe v2)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2

_KINDS = {"i4": "INT32", "f4": "FP32", "u8": "UINT64", "b1": "BOOL"}
NO_END = -1  # `end_id` if no token ends the output


class InferParams(NamedTuple):
    """Parameters that many requests share: all except prompt and seed."""

    max_output: int
    min_output: int = 0
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0
    top_p: float = 1.0
    end_id: int | None = None
    stop_words: tuple[tuple[int, ...], ...] = ()
    streaming: bool = True


def request_of(model: str, id_: str, prompt: NDArray[np.int32], params: InferParams, seed: int = 0) -> bytes:
    """Return a serialized ModelInferRequest whose final response is marked (`is_last`).

    The parts that requests share are serialized once. Protobuf accepts the fields of a message in any order,
    and the items of a repeated field in sequence.
    """
    contents = [prompt.astype(np.int32, copy=False).tobytes(), len(prompt).to_bytes(4, "little")]
    seeded = params.temperature > 0
    if seeded:
        contents.append(seed.to_bytes(8, "little"))
    own = service_pb2.ModelInferRequest(id=id_, raw_input_contents=contents)
    return bytes(own.SerializeToString()) + _own_inputs(len(prompt), seeded) + _common(model, params)


@lru_cache(maxsize=4096)
def _own_inputs(prompt_len: int, seeded: bool) -> bytes:
    """Return the serialized descriptions of the inputs that differ between requests."""
    message = service_pb2.ModelInferRequest()
    message.inputs.add(name="input_ids", datatype="INT32", shape=(1, prompt_len))
    message.inputs.add(name="input_lengths", datatype="INT32", shape=(1, 1))
    if seeded:
        message.inputs.add(name="seed", datatype="UINT64", shape=(1, 1))
    return bytes(message.SerializeToString())


@lru_cache(maxsize=256)
def _common(model: str, params: InferParams) -> bytes:
    """Return the serialized parts that requests share. They follow the request's own inputs."""
    greedy = params.temperature == 0
    values: dict[str, NDArray[Any]] = {
        "request_output_len": np.array([params.max_output], np.int32),
        "streaming": np.array([params.streaming]),
        "exclude_input_in_output": np.array([True]),
        "runtime_top_k": np.array([1 if greedy else params.top_k], np.int32),
    }
    if not greedy:
        values["temperature"] = np.array([params.temperature], np.float32)
        values["runtime_top_p"] = np.array([params.top_p], np.float32)
    if params.min_output > 1:
        values["min_tokens"] = np.array([params.min_output], np.int32)
    if params.end_id is not None:
        values["end_id"] = np.array([params.end_id], np.int32)
    if params.stop_words:
        values["stop_words_list"] = word_list(params.stop_words)
    return _message(model, "", values)


def stop_of(model: str, id_: str) -> bytes:
    """Return a request that ends the request with this id. Its own response is final and empty."""
    one = np.ones(1, np.int32)
    return _message(
        model,
        id_,
        {"stop": np.array([True]), "input_ids": one, "input_lengths": one, "request_output_len": one},
    )


def _message(model: str, id_: str, values: dict[str, NDArray[Any]]) -> bytes:
    request = service_pb2.ModelInferRequest(model_name=model, id=id_)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, value in values.items():
        shape = (1, *value.shape)
        request.inputs.add(name=name, datatype=_KINDS[value.dtype.str[1:]], shape=shape)
        request.raw_input_contents.append(value.tobytes())
    for name in ("output_ids", "sequence_length"):
        request.outputs.add(name=name)
    return bytes(request.SerializeToString())


def word_list(stop_words: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """Return stop words in TensorRT-LLM's form, int32 [2, n].

    The first row is the concatenated tokens; the second row is the end of each word, padded with -1.
    """
    tokens = [token for word in stop_words for token in word]
    listed = np.full((2, len(tokens)), -1, np.int32)
    listed[0] = tokens
    listed[1, : len(stop_words)] = np.cumsum([len(word) for word in stop_words])
    return listed


def is_last(response: Any) -> bool:
    """Return whether a ModelInferResponse is a request's last."""
    return bool(response.parameters["triton_final_response"].bool_param)


def tokens_of(response: Any) -> list[int]:
    """Return the tokens of the first beam in a ModelInferResponse.

    Raises ValueError if there is no such tensor.
    """
    ids = length = None
    for output, content in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.name == "output_ids":
            ids = np.frombuffer(content, np.int32)
        elif output.name == "sequence_length":
            length = np.frombuffer(content, np.int32)
    if ids is None:
        if length is None:
            return []
        raise ValueError("a response has no output_ids")
    tokens: list[int] = (ids if length is None or not len(length) else ids[: length[0]]).tolist()
    return tokens
