"""Requests of triton_grpc: serialised parts make one message, with contents in the order of the inputs."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("tritonclient.grpc")

from tritonclient.grpc import service_pb2

from mpillm.triton.core.tensors import InferParams, _common, request_of, stop_of, word_list

KINDS = {"INT32": np.int32, "FP32": np.float32, "UINT64": np.uint64, "BOOL": np.bool_}


def read(data: bytes) -> tuple[service_pb2.ModelInferRequest, dict[str, list[object]]]:
    """Return the message, and its inputs by name, in the shapes that it states."""
    message = service_pb2.ModelInferRequest.FromString(data)
    pairs = zip(message.inputs, message.raw_input_contents, strict=True)
    return message, {
        one.name: np.frombuffer(raw, KINDS[one.datatype]).reshape(tuple(one.shape)).tolist()
        for one, raw in pairs
    }


def test_a_greedy_request() -> None:
    message, inputs = read(request_of("m", "7", np.array([5, 6, 7], np.int32), InferParams(4, end_id=2)))
    assert (message.model_name, message.id) == ("m", "7")
    assert message.parameters["triton_enable_empty_final_response"].bool_param
    assert [output.name for output in message.outputs] == ["output_ids", "sequence_length"]
    assert inputs == {
        "input_ids": [[5, 6, 7]],
        "input_lengths": [[3]],
        "request_output_len": [[4]],
        "streaming": [[True]],
        "exclude_input_in_output": [[True]],
        "runtime_top_k": [[1]],
        "end_id": [[2]],
    }


def test_each_has_its_own_prompt_words_and_seed() -> None:
    """Only what two requests have in common is kept from the earlier one."""
    first = InferParams(4, 2, 0.5, 3, 0.9, None, ((8, 9), (10,)), False)
    for n, wanted in enumerate((first, first, first._replace(stop_words=((1,),)))):
        prompt = np.arange(1 + n, dtype=np.int32)
        message, inputs = read(request_of("m", str(n), prompt, wanted, 11 + n))
        assert message.id == str(n) and inputs["input_ids"] == [prompt.tolist()]
        assert inputs["input_lengths"] == [[len(prompt)]] and inputs["seed"] == [[11 + n]]
        assert inputs["stop_words_list"] == [word_list(wanted.stop_words).tolist()]
        assert (inputs["temperature"], inputs["runtime_top_k"], inputs["min_tokens"]) == (
            [[0.5]],
            [[3]],
            [[2]],
        )
        assert inputs["streaming"] == [[False]]


def test_a_stop() -> None:
    message, inputs = read(stop_of("m", "7"))
    assert (message.model_name, message.id, inputs["stop"]) == ("m", "7", [[True]])


def test_requests_that_differ_in_their_seeds_have_the_rest_in_common() -> None:
    """LoadGen's samples have seeds of their own, also where greedy answers need none."""
    _common.cache_clear()
    for temperature in (0.0, 0.5):
        for seed in range(5):
            request_of("m", "7", np.array([5], np.int32), InferParams(4, temperature=temperature), seed)
    assert _common.cache_info().misses == 2
