"""Requests to a tritonserver over HTTP: KServe's JSON, and Triton's `generate` and `generate_stream`."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from mpillm.triton_client.connection import AnswerError, Response, Tensors

_KINDS = {"i4": "INT32", "f4": "FP32", "u8": "UINT64", "b1": "BOOL", "O": "BYTES"}
_TYPES: Mapping[str, Any] = {
    "INT32": np.int32,
    "INT64": np.int64,
    "FP32": np.float32,
    "UINT64": np.uint64,
    "BOOL": np.bool_,
    "BYTES": object,
}


class HttpConnection:
    """Keeps a connection open, as a context, for one request at a time."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """Connect when a request is made; the server may be silent for `timeout_s`."""
        self.url = url
        self._connection = http.client.HTTPConnection(url, timeout=timeout_s)

    def __enter__(self) -> HttpConnection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def ask(
        self, model: str, tensors: Tensors, outputs: Sequence[str] = (), request_id: str = ""
    ) -> Iterator[Response]:
        """Yield the response to a request. Raises AnswerError if it fails, or the model is decoupled."""
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
            answer = json.loads(response.read())
            yield {
                output["name"]: _array(output["data"], output["datatype"]).reshape(output["shape"])
                for output in answer["outputs"]
            }

    def generate(self, model: str, values: Mapping[str, Any], stream: bool) -> Iterator[dict[str, Any]]:
        """Yield the answer of `generate`, or those of `generate_stream` as they come.

        Raises AnswerError if the request fails.
        """
        with self._answer(f"{model}/generate{'_stream' if stream else ''}", values) as response:
            if not stream:
                yield json.loads(response.read())
                return
            while line := response.readline():
                if line.startswith(b"data:"):
                    part = json.loads(line[5:])
                    if "error" in part:
                        raise AnswerError(part["error"])
                    yield part

    @contextlib.contextmanager
    def _answer(self, path: str, body: Mapping[str, Any]) -> Iterator[http.client.HTTPResponse]:
        """Post; what goes wrong until the answer is read raises AnswerError, and closes the connection.

        The next request opens another.
        """
        try:
            self._connection.request("POST", f"/v2/models/{path}", json.dumps(body))
            response = self._connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise AnswerError(f"{self.url}: HTTP {response.status}: {_said(response.read())}")
            yield response
        except AnswerError:
            self._connection.close()
            raise
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, RecursionError) as error:
            self._connection.close()
            raise AnswerError(f"{self.url}: {type(error).__name__}: {error}") from None


def _said(body: bytes) -> str:
    """Return the message of an error, or all of it."""
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return body.decode(errors="replace")


def _array(data: Sequence[Any], kind: str) -> Any:
    if kind == "BYTES":
        return np.array([text.encode() for text in data], object)
    return np.array(data, _TYPES[kind])
