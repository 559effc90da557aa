"""A gRPC stream of a tritonserver, which answers requests one after another.

A stream reaches every model: a decoupled one answers nothing else, and one that is not decoupled answers over
streams, too.
"""

from __future__ import annotations

import math
import queue
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import tritonclient.grpc as grpcclient
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

Tensors = Mapping[str, NDArray[Any]]
Response = dict[str, NDArray[Any]]
CANCELLED = "StatusCode.CANCELLED"


class AnswerError(Exception):
    """A request was refused, or has no answer. `status`: gRPC's, if there is one."""

    def __init__(self, message: str, status: str | None = None) -> None:
        super().__init__(message)
        self.status = status


class Stop(NamedTuple):
    """Says how a request ends early: after these seconds, by Triton's `stop` input or by gRPC's
    cancellation."""

    after_s: float
    by_cancel: bool = False


class Secure(NamedTuple):
    """Names the files of an encrypted connection. None: the system's own, or none."""

    root_certificates: str | None = None
    private_key: str | None = None
    certificate_chain: str | None = None


class Connection:
    """Holds a stream, as a context that closes it."""

    def __init__(
        self, url: str, timeout_s: float, secure: Secure | None = None, compression: str | None = None
    ) -> None:
        """Open the stream; an answer may take `timeout_s` as a whole.

        Raises AnswerError for a wrong address.
        """
        self.url = url
        self._timeout_s = timeout_s
        self._compression = compression
        try:
            self._client = grpcclient.InferenceServerClient(
                url, ssl=secure is not None, **(secure._asdict() if secure else {})
            )
        except (InferenceServerException, OSError) as error:
            raise AnswerError(f"{url}: {error}") from None
        self._open()

    def _open(self) -> None:
        responses: queue.SimpleQueue[tuple[Any, InferenceServerException | None]] = queue.SimpleQueue()
        self._responses = responses
        self._client.start_stream(
            lambda result, error: responses.put((result, error)), compression_algorithm=self._compression
        )

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.stop_stream(cancel_requests=True)
        self._client.close()

    def ask(
        self,
        model: str,
        tensors: Tensors,
        outputs: Sequence[str] = (),
        request_id: str = "",
        stop: Stop | None = None,
    ) -> Iterator[Response]:
        """Yield the responses to a request; one without tensors answers a stop.

        `tensors` have the dimension of the batch; `outputs` are those that are wanted, by default all. Raises
        AnswerError if the request fails.
        """
        began = time.monotonic()
        end, stop_at = began + self._timeout_s, began + stop.after_s if stop else math.inf
        if stop is not None and not request_id:
            request_id = uuid.uuid4().hex  # a stop is for the request of this id
        self._send(model, tensors, outputs, request_id)
        finals, expected = 0, 1  # responses that are the last of their request
        while finals < expected:
            if stop is not None and time.monotonic() >= stop_at:
                stop_at = math.inf
                if stop.by_cancel:
                    self._client.stop_stream(cancel_requests=True)
                    self._open()
                    raise AnswerError("the request is cancelled", CANCELLED)
                self._send_stop(model, request_id)
                expected = 2
            result = self._next(min(end, stop_at))
            if result is None:
                if time.monotonic() >= end:
                    what = f"{self.url}: {model} has not answered within {self._timeout_s:g} s"
                    raise AnswerError(what)
                continue
            response = result.get_response()
            values = {output.name: result.as_numpy(output.name) for output in response.outputs}
            finals += response.parameters["triton_final_response"].bool_param
            if values or expected == 2:
                yield values

    def _send(self, model: str, tensors: Tensors, outputs: Sequence[str], request_id: str) -> None:
        inputs = []
        for name, value in tensors.items():
            one = grpcclient.InferInput(name, value.shape, np_to_triton_dtype(value.dtype))
            inputs.append(one.set_data_from_numpy(value))
        wanted = [grpcclient.InferRequestedOutput(name) for name in outputs] or None
        try:
            self._client.async_stream_infer(
                model, inputs, outputs=wanted, request_id=request_id, enable_empty_final_response=True
            )
        except InferenceServerException as error:
            self._next(time.monotonic())  # raises why the stream has ended, if that is known
            raise AnswerError(f"{self.url}: {error}") from None

    def _send_stop(self, model: str, request_id: str) -> None:
        one = np.ones((1, 1), np.int32)
        tensors = {"input_ids": one, "input_lengths": one, "request_output_len": one}
        self._send(model, {**tensors, "stop": np.array([[True]])}, (), request_id)

    def _next(self, until: float) -> Any:
        """Return the next response, or None if there is none until this time of the monotonic clock.

        Raises AnswerError if the request has failed.
        """
        try:
            result, error = self._responses.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return None
        if error is not None:
            raise AnswerError(str(error), error.status())
        return result
