"""A gRPC connection to a tritonserver, for one request at a time.

A decoupled model only answers over a stream. Any other model gets a plain call, because tritonserver can
crash when such a model answers over a stream (see `mpillm.triton.core.stream`).
"""

from __future__ import annotations

import contextlib
import math
import queue
import struct
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tritonclient.grpc as grpcclient
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from launch.bounded_http import GRPC_OPTIONS
from launch.safe_text import one_line

Tensors = Mapping[str, NDArray[Any]]
Response = dict[str, NDArray[Any]]
CANCELLED = "StatusCode.CANCELLED"
_END_S = 5.0
_Responses = queue.SimpleQueue[tuple[Any, InferenceServerException | None]]


class InferError(Exception):
    """A request failed. `status`: gRPC's, if there is one."""

    def __init__(self, message: str, status: str | None = None) -> None:
        super().__init__(message)
        self.status = status


_NO_ANSWER = (
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    struct.error,
)


@contextlib.contextmanager
def as_answer(url: str) -> Iterator[None]:
    """Read a server's response in the block. Raises InferError if it is malformed."""
    try:
        yield
    except _NO_ANSWER as error:
        raise InferError(f"{url}: {one_line(f'{type(error).__name__}: {error}')}") from None


class StopSpec(NamedTuple):
    """Early end of a request after some time, by Triton's `stop` input or by gRPC's cancellation."""

    after_s: float
    by_cancel: bool = False


class Secure(NamedTuple):
    """Files for an encrypted connection. None: the system's, or none."""

    root_certificates: str | None = None
    private_key: str | None = None
    certificate_chain: str | None = None


class GrpcConnection:
    """Context that closes a channel, and a stream after the first request to a decoupled model."""

    def __init__(
        self, url: str, timeout_s: float, secure: Secure | None = None, compression: str | None = None
    ) -> None:
        """Open the channel. Raises InferError for a wrong address.

        `timeout_s`: for a whole answer.
        """
        self.url = url
        self._timeout_s = timeout_s
        self._compression = compression
        try:
            self._client = grpcclient.InferenceServerClient(
                url,
                ssl=secure is not None,
                channel_args=GRPC_OPTIONS,
                **(secure._asdict() if secure else {}),
            )
        except (InferenceServerException, OSError) as error:
            raise InferError(f"{url}: {error}") from None
        self._responses: _Responses = queue.SimpleQueue()
        self._has_stream = False
        self._call: Any = None  # the last plain call
        self._is_decoupled: dict[str, bool] = {}  # by model
        self._n_outstanding = 0

    def __enter__(self) -> GrpcConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_stream(by_cancel=self._n_outstanding > 0)
        self._client.close()

    def _end_stream(self, by_cancel: bool) -> None:
        if not by_cancel:  # tritonserver 2.51 can crash when it cancels requests that have ended
            ending = threading.Thread(target=self._client.stop_stream, daemon=True)
            ending.start()
            ending.join(_END_S)
            by_cancel = ending.is_alive()
        if by_cancel:
            self._client.stop_stream(cancel_requests=True)
        self._has_stream, self._n_outstanding = False, 0

    def _decoupled(self, model: str) -> bool:
        """Return whether a model is decoupled. Raises InferError if it does not exist."""
        if model not in self._is_decoupled:
            try:
                config = self._client.get_model_config(model, client_timeout=self._timeout_s).config
            except InferenceServerException as error:
                if error.status() == "StatusCode.DEADLINE_EXCEEDED":
                    raise self._silent(model) from None
                raise InferError(str(error), error.status()) from None
            self._is_decoupled[model] = config.model_transaction_policy.decoupled
        return self._is_decoupled[model]

    def infer(
        self,
        model: str,
        tensors: Tensors,
        outputs: Sequence[str] = (),
        request_id: str = "",
        stop: StopSpec | None = None,
    ) -> Iterator[Response]:
        """Yield the responses to a request. The response to a stop has no tensors. Raises InferError.

        `tensors`: with the batch dimension. `outputs`: names of the requested outputs; default: all.
        """
        began = time.monotonic()
        end, stop_at = began + self._timeout_s, began + stop.after_s if stop else math.inf
        if stop is not None and not request_id:
            request_id = uuid.uuid4().hex  # a stop names the request by its id
        decoupled = self._decoupled(model)
        finals, expected = 0, 1  # counts of final responses
        try:
            self._send(model, tensors, outputs, request_id)
            while finals < expected:
                if stop is not None and time.monotonic() >= stop_at:
                    stop_at = math.inf
                    if stop.by_cancel:
                        raise InferError("the request is cancelled", CANCELLED)
                    self._send_stop(model, request_id)
                    expected = 2
                result = self._next(min(end, stop_at))
                if result is None:
                    if time.monotonic() >= end:
                        raise self._silent(model)
                    continue
                response = result.get_response()
                with as_answer(self.url):
                    values = {output.name: result.as_numpy(output.name) for output in response.outputs}
                is_last = not decoupled or response.parameters["triton_final_response"].bool_param
                finals += is_last
                self._n_outstanding -= is_last
                if values or expected == 2:
                    yield values
        finally:
            if finals < expected:
                self._drop(decoupled)

    def _silent(self, model: str) -> InferError:
        return InferError(f"{self.url}: {model} has not answered within {self._timeout_s:g} s")

    def _send(self, model: str, tensors: Tensors, outputs: Sequence[str], request_id: str) -> None:
        inputs = []
        for name, value in tensors.items():
            one = grpcclient.InferInput(name, value.shape, np_to_triton_dtype(value.dtype))
            inputs.append(one.set_data_from_numpy(value))
        requested = [grpcclient.InferRequestedOutput(name) for name in outputs] or None
        responses = self._responses

        def on_response(result: Any, error: InferenceServerException | None) -> None:
            responses.put((result, error))

        self._n_outstanding += 1
        try:
            if not self._decoupled(model):
                self._call = self._client.async_infer(
                    model, inputs, on_response, outputs=requested, request_id=request_id,
                    compression_algorithm=self._compression,
                )  # fmt: skip
                return
            if not self._has_stream:
                self._client.start_stream(on_response, compression_algorithm=self._compression)
                self._has_stream = True
            self._client.async_stream_infer(
                model, inputs, outputs=requested, request_id=request_id, enable_empty_final_response=True
            )
        except InferenceServerException as error:
            self._next(time.monotonic())  # raises the error that ended the stream, if there is one
            raise InferError(f"{self.url}: {error}") from None

    def _drop(self, decoupled: bool) -> None:
        """Cancel open requests. Their late responses must not answer the next request."""
        by_cancel = self._n_outstanding > 0
        if decoupled:
            self._end_stream(by_cancel)
        elif by_cancel and self._call is not None:
            self._call.cancel()
        self._responses, self._n_outstanding = queue.SimpleQueue(), 0

    def _send_stop(self, model: str, request_id: str) -> None:
        one = np.ones((1, 1), np.int32)
        tensors = {"input_ids": one, "input_lengths": one, "request_output_len": one}
        self._send(model, {**tensors, "stop": np.array([[True]])}, (), request_id)

    def _next(self, until: float) -> Any:
        """Return the next response, or None if none arrives until this time of the monotonic clock.

        Raises InferError if the request has failed.
        """
        try:
            result, error = self._responses.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return None
        if error is not None:
            self._n_outstanding -= 1
            raise InferError(str(error), error.status())
        return result
