"""A gRPC connection to a tritonserver, which answers requests one after another.

A decoupled model answers only over a stream. One that is not is asked by a plain call, although it answers
over streams, too: there tritonserver can crash (`mpillm.triton.core.stream` says why).
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
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import tritonclient.grpc as grpcclient
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from launch.bounded_http import OF_GRPC
from launch.outside import one_line

Tensors = Mapping[str, NDArray[Any]]
Response = dict[str, NDArray[Any]]
CANCELLED = "StatusCode.CANCELLED"
_END_S = 5.0
_Responses = queue.SimpleQueue[tuple[Any, InferenceServerException | None]]


class AnswerError(Exception):
    """A request was refused, or has no answer. `status`: gRPC's, if there is one."""

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
    """Read what a server has sent: what is not as it should be raises AnswerError."""
    try:
        yield
    except _NO_ANSWER as error:
        raise AnswerError(f"{url}: {one_line(f'{type(error).__name__}: {error}')}") from None


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
    """Holds a channel and, once a decoupled model was asked, a stream, as a context that closes them."""

    def __init__(
        self, url: str, timeout_s: float, secure: Secure | None = None, compression: str | None = None
    ) -> None:
        """Make the channel; an answer may take `timeout_s` as a whole.

        Raises AnswerError for a wrong address.
        """
        self.url = url
        self._timeout_s = timeout_s
        self._compression = compression
        try:
            self._client = grpcclient.InferenceServerClient(
                url,
                ssl=secure is not None,
                channel_args=OF_GRPC,
                **(secure._asdict() if secure else {}),
            )
        except (InferenceServerException, OSError) as error:
            raise AnswerError(f"{url}: {error}") from None
        self._responses: _Responses = queue.SimpleQueue()
        self._has_stream = False
        self._is_decoupled: dict[str, bool] = {}  # of each model that was asked
        self._n_owed = 0

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_stream(by_cancel=self._n_owed > 0)
        self._client.close()

    def _end_stream(self, by_cancel: bool) -> None:
        if not by_cancel:  # tritonserver 2.51 can crash when it cancels what has ended
            ending = threading.Thread(target=self._client.stop_stream, daemon=True)
            ending.start()
            ending.join(_END_S)
            by_cancel = ending.is_alive()
        if by_cancel:
            self._client.stop_stream(cancel_requests=True)
        self._has_stream, self._n_owed = False, 0

    def _decoupled(self, model: str) -> bool:
        """Return whether a model may answer in several responses. Raises AnswerError if it is not there."""
        if model not in self._is_decoupled:
            try:
                config = self._client.get_model_config(model, client_timeout=self._timeout_s).config
            except InferenceServerException as error:
                if error.status() == "StatusCode.DEADLINE_EXCEEDED":
                    raise self._silent(model) from None
                raise AnswerError(str(error), error.status()) from None
            self._is_decoupled[model] = config.model_transaction_policy.decoupled
        return self._is_decoupled[model]

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
        decoupled = self._decoupled(model)
        self._send(model, tensors, outputs, request_id)
        finals, expected = 0, 1  # responses that are the last of their request
        while finals < expected:
            if stop is not None and time.monotonic() >= stop_at:
                stop_at = math.inf
                if stop.by_cancel:
                    self._cancel(decoupled)
                    raise AnswerError("the request is cancelled", CANCELLED)
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
            self._n_owed -= is_last
            if values or expected == 2:
                yield values

    def _silent(self, model: str) -> AnswerError:
        return AnswerError(f"{self.url}: {model} has not answered within {self._timeout_s:g} s")

    def _send(self, model: str, tensors: Tensors, outputs: Sequence[str], request_id: str) -> None:
        inputs = []
        for name, value in tensors.items():
            one = grpcclient.InferInput(name, value.shape, np_to_triton_dtype(value.dtype))
            inputs.append(one.set_data_from_numpy(value))
        wanted = [grpcclient.InferRequestedOutput(name) for name in outputs] or None
        responses = self._responses

        def heard(result: Any, error: InferenceServerException | None) -> None:
            responses.put((result, error))

        self._n_owed += 1
        try:
            if not self._decoupled(model):
                self._call = self._client.async_infer(
                    model, inputs, heard, outputs=wanted, request_id=request_id,
                    compression_algorithm=self._compression,
                )  # fmt: skip
                return
            if not self._has_stream:
                self._client.start_stream(heard, compression_algorithm=self._compression)
                self._has_stream = True
            self._client.async_stream_infer(
                model, inputs, outputs=wanted, request_id=request_id, enable_empty_final_response=True
            )
        except InferenceServerException as error:
            self._next(time.monotonic())  # raises why the stream has ended, if that is known
            raise AnswerError(f"{self.url}: {error}") from None

    def _cancel(self, decoupled: bool) -> None:
        """Cancel what is open; nothing more of it is heard."""
        if decoupled:
            self._end_stream(by_cancel=True)
        else:
            self._call.cancel()
        self._responses, self._n_owed = queue.SimpleQueue(), 0

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
            self._n_owed -= 1
            raise AnswerError(str(error), error.status())
        return result
