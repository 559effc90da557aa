"""Requests to a tritonserver over HTTP: KServe's JSON, and Triton's `generate` and `generate_stream`."""

from __future__ import annotations

import contextlib
import http
import json
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPResponse
from typing import Any

import numpy as np

from launch.bounded_http import MAX_ANSWER_BYTES, BoundedClient, ReplyError
from launch.safe_text import one_line
from mpillm.triton.client.connection import InferError, Response, Tensors, as_answer

_KINDS = {"i4": "INT32", "f4": "FP32", "u8": "UINT64", "b1": "BOOL", "O": "BYTES"}
_TYPES: Mapping[str, Any] = {
    "INT32": np.int32,
    "INT64": np.int64,
    "FP32": np.float32,
    "UINT64": np.uint64,
    "BOOL": np.bool_,
    "BYTES": object,
}


class KServeConnection:
    """Context with a persistent connection, for one request at a time."""

    def __init__(self, url: str, timeout_s: float, max_bytes: int = MAX_ANSWER_BYTES) -> None:
        """Prepare a connection, which the first request opens. Raises InferError for a wrong address.

        `timeout_s`, `max_bytes`: of a whole answer.
        """
        self.url = url
        self._timeout_s, self._max_bytes = timeout_s, max_bytes
        try:
            self._server = BoundedClient(url)
        except ReplyError as error:
            raise InferError(f"{url}: {error}") from None

    def __enter__(self) -> KServeConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def infer(
        self, model: str, tensors: Tensors, outputs: Sequence[str] = (), request_id: str = ""
    ) -> Iterator[Response]:
        """Yield the response to a request. Raises InferError, also for a decoupled model."""
        body: dict[str, Any] = {
            "id": request_id,
            "inputs": [
                {
                    "name": name,
                    "shape": [*value.shape],
                    "datatype": _KINDS[value.dtype.str[1:]],
                    "data": value.reshape(-1).tolist(),
                }
                for name, value in tensors.items()
            ],
        }
        if outputs:
            body["outputs"] = [{"name": name} for name in outputs]
        with self._answer(f"{model}/infer", body) as response:
            answer = _object(response.read())
            yield {
                output["name"]: _array(output["data"], output["datatype"]).reshape(output["shape"])
                for output in answer["outputs"]
            }

    def generate(self, model: str, values: Mapping[str, Any], stream: bool) -> Iterator[dict[str, Any]]:
        """Yield the answer of `generate`, or the parts of `generate_stream` as they arrive.

        Raises InferError.
        """
        with self._answer(f"{model}/generate{'_stream' if stream else ''}", values) as response:
            if not stream:
                yield _object(response.read())
                return
            while line := response.readline():
                if line.startswith(b"data:"):
                    part = _object(line[5:])
                    if "error" in part:
                        raise InferError(one_line(str(part["error"])) or "an error without a reason")
                    yield part

    @contextlib.contextmanager
    def _answer(self, path: str, body: Mapping[str, Any]) -> Iterator[HTTPResponse]:
        """Post a request; the block reads the answer. Raises InferError and closes the connection on failure.

        The next request opens a new connection.
        """
        data = json.dumps(body).encode()
        try:
            with (
                as_answer(self.url),
                self._server.request(
                    f"/v2/models/{path}", self._timeout_s, data, self._max_bytes
                ) as response,
            ):
                if response.status != http.HTTPStatus.OK:
                    raise InferError(f"{self.url}: HTTP {response.status}: {_error_message(response.read())}")
                yield response
        except ReplyError as error:
            raise InferError(f"{self.url}: {error}") from None


def _object(body: bytes) -> dict[str, Any]:
    value = json.loads(body)
    if not isinstance(value, dict):
        raise TypeError("the response is not a JSON object")
    return value


def _error_message(body: bytes) -> str:
    """Return the message of an error response, or the beginning of the body."""
    try:
        return one_line(str(json.loads(body)["error"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return one_line(body)


def _array(data: Sequence[Any], kind: str) -> Any:
    if kind == "BYTES":
        return np.array([text.encode() for text in data], object)
    return np.array(data, _TYPES[kind])
