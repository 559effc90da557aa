"""Before a test: wait until a tritonserver and its models are ready, and find the models that take tokens."""

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
from launch.outside import one_line
from mpillm.comms.messages import WAITING
from mpillm.triton.core.stream import error_text

_log = logging.getLogger(__name__)
_PAUSE_S = 0.2
_FIRST_LOG_S, _LOG_S = 2.0, 10.0
_ASK_S = 10.0
_HTTP_S = 2.0
_MOST_LISTED = 1000  # characters of models' names
_LOOK_S = 0.1  # while it does not answer
_HTTP_PORT = " (this is an HTTP port; gRPC has one of its own, 8001 by default)"
_REFUSALS = (
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)
_INPUTS = {"input_ids", "request_output_len"}


class TritonError(Exception):
    """What is wrong with a server, which the message names."""


class Model(NamedTuple):
    """A model of a server."""

    name: str
    decoupled: bool
    backend: str = ""  # Triton's name of what runs it; empty for an ensemble


def framework_of(model: Model) -> str:
    """Return what computes a model, as far as its server says: a Python backend's model may be anything."""
    if model.backend == "tensorrtllm":
        return "TensorRT-LLM behind tritonserver"
    return f"tritonserver, {'backend ' + model.backend if model.backend else 'an ensemble'}"


def until_ready(
    url: str,
    channel: grpc.Channel,
    deadline_s: float,
    tell: Callable[[str], None] = lambda text: None,
    began: float | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Wait until the server and all its models are ready; `tell` what it waits for, again and again.

    `meanwhile`: called while it does not answer. Raises TritonError after `deadline_s`, from `began` on
    (time.monotonic); None: from now on.
    """
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    start = time.monotonic() if began is None else began
    logged = time.monotonic() - _LOG_S + _FIRST_LOG_S
    last = "it was not asked"
    # Whether it speaks HTTP is asked within the same deadline: this rank's phase also has one.
    http_s = min(_HTTP_S, deadline_s / 4)
    ask_http_at = start + http_s
    while (left := start + deadline_s - http_s - time.monotonic()) > 0:
        try:
            request = service_pb2.ServerReadyRequest()
            if _asked(stub.ServerReady, request, min(left, _ASK_S), meanwhile).ready:
                return
            last = "it is up, but its models are not loaded"
        except grpc.RpcError as error:
            last = error_text(error)
            if error.code() in _REFUSALS:
                raise TritonError(f"tritonserver {url}: {last}") from None
            if time.monotonic() >= ask_http_at:
                if _speaks_http(url, http_s):
                    raise TritonError(f"tritonserver {url}: {last}{_HTTP_PORT}") from None
                ask_http_at = math.inf
        waiting = f"{WAITING}tritonserver {url}: {last}"
        tell(waiting)
        if time.monotonic() - logged > _LOG_S:
            logged = time.monotonic()
            _log.warning("%s", waiting)
        time.sleep(min(_PAUSE_S, max(0.0, left)))
    if ask_http_at < math.inf and _speaks_http(url, http_s):  # a second question would exceed the deadline
        last += _HTTP_PORT
    raise TritonError(f"tritonserver {url} was not ready within {deadline_s:g} s: {last}")


def _speaks_http(url: str, timeout_s: float) -> bool:
    """Return whether HTTP is spoken there.

    gRPC's own error does not tell: it is that of the address of the host that it tried last.
    """
    try:
        return bool(page(f"http://{url}/v2", timeout_s)[0])
    except (ReplyError, ValueError):
        return False


def _asked(method: Any, request: Any, timeout_s: float, meanwhile: Callable[[], None]) -> Any:
    """Return what a server answers. Raises grpc.RpcError, and what `meanwhile` does."""
    call = method.future(request, timeout=timeout_s)
    try:
        while True:
            try:
                return call.result(timeout=_LOOK_S)
            except grpc.FutureTimeoutError:
                meanwhile()
    finally:
        call.cancel()


def find_models(
    url: str,
    channel: grpc.Channel,
    wanted: str | None,
    timeout_s: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[Model]:
    """Return the models that requests go to: `wanted`, or all that take tokens.

    `meanwhile`: called while it does not answer. Raises TritonError if there is none.
    """
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

    def ask(method: Any, request: Any) -> Any:
        try:
            return _asked(method, request, timeout_s, meanwhile)
        except grpc.RpcError as error:
            raise TritonError(f"tritonserver {url}: {error_text(error)}") from None

    index = ask(stub.RepositoryIndex, service_pb2.RepositoryIndexRequest(ready=True))
    names = sorted(model.name for model in index.models)
    if wanted is not None and wanted not in names:
        listed = one_line(", ".join(names), _MOST_LISTED) or "none"
        raise TritonError(
            f"tritonserver {url} has no model {wanted}{nearest(wanted, names)}; it has {listed}"
        )
    models = []
    for name in [wanted] if wanted is not None else names:
        config = ask(stub.ModelConfig, service_pb2.ModelConfigRequest(name=name)).config
        if {tensor.name for tensor in config.input} >= _INPUTS:
            models.append(Model(name, config.model_transaction_policy.decoupled, config.backend))
    if not models:
        listed = one_line(", ".join(names), _MOST_LISTED) or "none"
        raise TritonError(
            f"tritonserver {url} has no model with the inputs input_ids and request_output_len: {listed}"
        )
    return models
