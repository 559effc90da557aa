"""Wait until a tritonserver and its models are ready, and find the models whose inputs are tokens."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from disagg.errors import nearest
from launch.bounded_http import ReplyError, page
from launch.safe_text import one_line
from mpillm.comms.messages import WAITING
from mpillm.triton.core.stream import error_text

_log = logging.getLogger(__name__)
_PAUSE_S = 0.2
_FIRST_LOG_S, _LOG_S = 2.0, 10.0
_CALL_TIMEOUT_S = 10.0
_HTTP_S = 2.0
_MAX_LISTED = 1000  # characters of models' names
_LOOK_S = 0.1  # between calls of `on_wait`
_HTTP_PORT = " (this is an HTTP port; gRPC has one of its own, 8001 by default)"
_REFUSALS = (
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)
_INPUTS = {"input_ids", "request_output_len"}


class TritonError(Exception):
    """Error of a server; the message contains its address."""


class Model(NamedTuple):
    """A model of a server."""

    name: str
    decoupled: bool
    backend: str = ""  # Triton's backend; empty for an ensemble


def framework_of(model: Model) -> str:
    """Return the framework of a model, as its server reports it. A Python backend's model may be anything."""
    if model.backend == "tensorrtllm":
        return "TensorRT-LLM behind tritonserver"
    return f"tritonserver, {'backend ' + model.backend if model.backend else 'an ensemble'}"


def until_ready(
    url: str,
    channel: grpc.Channel,
    deadline_s: float,
    report: Callable[[str], None] = lambda text: None,
    began: float | None = None,
    on_wait: Callable[[], None] = lambda: None,
) -> None:
    """Wait until the server and all its models are ready.

    Args:
        report: Called repeatedly with the reason for waiting.
        began: Start of `deadline_s` (time.monotonic); None: now.
        on_wait: Called while the server does not answer.

    Raises TritonError after `deadline_s`.
    """
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    start = time.monotonic() if began is None else began
    logged = time.monotonic() - _LOG_S + _FIRST_LOG_S
    last = "no request was sent"
    # The check for HTTP must fit into the deadline, because this rank's phase has a deadline as well.
    http_s = min(_HTTP_S, deadline_s / 4)
    check_http_at = start + http_s
    while (left := start + deadline_s - http_s - time.monotonic()) > 0:
        try:
            request = service_pb2.ServerReadyRequest()
            if _call(stub.ServerReady, request, min(left, _CALL_TIMEOUT_S), on_wait).ready:
                return
            last = "it is up, but its models are not loaded"
        except grpc.RpcError as error:
            last = error_text(error)
            if error.code() in _REFUSALS:
                raise TritonError(f"tritonserver {url}: {last}") from None
            if time.monotonic() >= check_http_at:
                if _speaks_http(url, http_s):
                    raise TritonError(f"tritonserver {url}: {last}{_HTTP_PORT}") from None
                check_http_at = math.inf
        waiting = f"{WAITING}tritonserver {url}: {last}"
        report(waiting)
        if time.monotonic() - logged > _LOG_S:
            logged = time.monotonic()
            _log.warning("%s", waiting)
        time.sleep(min(_PAUSE_S, max(0.0, left)))
    if check_http_at < math.inf and _speaks_http(url, http_s):  # another check would exceed the deadline
        last += _HTTP_PORT
    raise TritonError(f"tritonserver {url} was not ready within {deadline_s:g} s: {last}")


def _speaks_http(url: str, timeout_s: float) -> bool:
    """Return whether the port speaks HTTP.

    gRPC's error does not show this: it only describes the last address of the host.
    """
    try:
        return bool(page(f"http://{url}/v2", timeout_s)[0])
    except (ReplyError, ValueError):
        return False


def _call(method: Any, request: Any, timeout_s: float, on_wait: Callable[[], None]) -> Any:
    """Return a server's response. Raises grpc.RpcError, and the exceptions of `on_wait`."""
    call = method.future(request, timeout=timeout_s)
    try:
        while True:
            try:
                return call.result(timeout=_LOOK_S)
            except grpc.FutureTimeoutError:
                on_wait()
    finally:
        call.cancel()


def find_models(
    url: str,
    channel: grpc.Channel,
    name: str | None,
    timeout_s: float,
    on_wait: Callable[[], None] = lambda: None,
) -> list[Model]:
    """Return the model `name`, or all models whose inputs are tokens.

    `on_wait`: called while the server does not answer. Raises TritonError if there is no such model.
    """
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

    def call(method: Any, request: Any) -> Any:
        try:
            return _call(method, request, timeout_s, on_wait)
        except grpc.RpcError as error:
            raise TritonError(f"tritonserver {url}: {error_text(error)}") from None

    index = call(stub.RepositoryIndex, service_pb2.RepositoryIndexRequest(ready=True))
    names = sorted(model.name for model in index.models)
    if name is not None and name not in names:
        listed = one_line(", ".join(names), _MAX_LISTED) or "none"
        raise TritonError(f"tritonserver {url} has no model {name}{nearest(name, names)}; it has {listed}")
    models = []
    for each in [name] if name is not None else names:
        config = call(stub.ModelConfig, service_pb2.ModelConfigRequest(name=each)).config
        if {tensor.name for tensor in config.input} >= _INPUTS:
            models.append(Model(each, config.model_transaction_policy.decoupled, config.backend))
    if not models:
        listed = one_line(", ".join(names), _MAX_LISTED) or "none"
        raise TritonError(
            f"tritonserver {url} has no model with the inputs input_ids and request_output_len: {listed}"
        )
    return models
