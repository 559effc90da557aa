"""The end-to-end test of TensorRT-LLM's backend (end_to_end_test.py).

Each prompt goes through preprocessing, tensorrt_llm and postprocessing, and through the ensemble, whose text
must be equal. Then all prompts are sent concurrently and timed.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpillm.triton.client.connection import GrpcConnection, as_answer
from mpillm.triton.client.kserve_http import KServeConnection
from mpillm.triton.client.prompts_file import Prompt

AnyConnection = GrpcConnection | KServeConnection
PORTS = {"grpc": 8001, "http": 8000}  # tritonserver's own
WARM_UPS = 10
_EMPTY = np.array([[""]], object)
_TO_ENGINE = {
    "INPUT_ID": "input_ids",
    "DECODER_INPUT_ID": "decoder_input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
}


class ServerAddress(NamedTuple):
    """Destination of requests. `protocol`: ``grpc`` or ``http``."""

    protocol: str
    url: str
    timeout_s: float

    def connect(self) -> AnyConnection:
        """Return a connection, as a context. Raises InferError for a wrong address."""
        if self.protocol == "grpc":
            return GrpcConnection(self.url, self.timeout_s)
        return KServeConnection(self.url, self.timeout_s)


class Differs(Exception):
    """Two models gave different texts for a prompt; the message contains them."""


def check(server: ServerAddress, prompts: Sequence[Prompt], models: Sequence[str]) -> None:
    """Compare the answers of `models` with the answers of the steps. Raises Differs or InferError."""
    with server.connect() as connection, as_answer(server.url):
        for prompt in prompts:
            expected = _by_steps(connection, prompt)
            for model in models:
                if (answer := _text(connection, model, prompt)) != expected:
                    raise Differs(
                        f"{prompt.text!r}: {model} answers {answer!r}, its steps answer {expected!r}"
                    )


def _by_steps(connection: AnyConnection, prompt: Prompt) -> str:
    first = _one(
        connection,
        "preprocessing",
        {
            "QUERY": np.array([[prompt.text]], object),
            "BAD_WORDS_DICT": _EMPTY,
            "STOP_WORDS_DICT": _EMPTY,
            "REQUEST_OUTPUT_LEN": np.array([[prompt.output_len]], np.int32),
        },
    )
    engine_inputs = {name: first[output] for output, name in _TO_ENGINE.items()}
    answer = _one(connection, "tensorrt_llm", engine_inputs)
    tokens = {"TOKENS_BATCH": answer["output_ids"], "SEQUENCE_LENGTH": answer["sequence_length"]}
    return _decoded(_one(connection, "postprocessing", tokens)["OUTPUT"])


def _text(connection: AnyConnection, model: str, prompt: Prompt) -> str:
    tensors = {
        "text_input": np.array([[prompt.text]], object),
        "max_tokens": np.array([[prompt.output_len]], np.int32),
        "bad_words": _EMPTY,
        "stop_words": _EMPTY,
    }
    return _decoded(_one(connection, model, tensors, ("text_output",))["text_output"])


def _one(
    connection: AnyConnection, model: str, tensors: dict[str, NDArray[Any]], outputs: Sequence[str] = ()
) -> dict[str, NDArray[Any]]:
    (response,) = connection.infer(model, tensors, outputs)
    return response


def _decoded(text: NDArray[Any]) -> str:
    return str(text.reshape(-1)[0].decode("utf-8", "replace"))


def measure(server: ServerAddress, prompts: Sequence[Prompt], model: str, concurrency: int) -> Iterator[str]:
    """Warm up, send all prompts, up to `concurrency` simultaneously, and yield the lines of the report.

    Raises InferError.
    """
    idle: queue.SimpleQueue[AnyConnection] = queue.SimpleQueue()
    n = min(concurrency, len(prompts))
    with contextlib.ExitStack() as stack:
        for _ in range(n):
            connection = server.connect()
            stack.enter_context(connection)
            idle.put(connection)

        def timed(prompt: Prompt) -> float:
            connection = idle.get()
            try:
                began = time.perf_counter()
                with as_answer(server.url):
                    _text(connection, model, prompt)
                return time.perf_counter() - began
            finally:
                idle.put(connection)

        yield "[INFO] Warm up for benchmarking."
        for _ in range(min(WARM_UPS, len(prompts))):
            timed(prompts[0])
        yield f"[INFO] Start benchmarking on {len(prompts)} prompts."
        began = time.perf_counter()
        with ThreadPoolExecutor(n) as threads:
            latencies = [*threads.map(timed, prompts)]
        yield f"[INFO] Total Latency: {1e3 * (time.perf_counter() - began):.3f} ms"
        yield f"[INFO] Total request latencies: {1e3 * sum(latencies):.3f} ms"
